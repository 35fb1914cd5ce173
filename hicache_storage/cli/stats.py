"""`hicache stats`: show how full a store is, and how fast pages come and go."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

from hicache_storage import config
from hicache_storage.cli.ages import age, format_time
from hicache_storage.cli.printing import output_console, print_json, print_lines, write_line
from hicache_storage.cli.progress import Meter, meter
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    open_listed_store,
    store_choice,
)
from hicache_storage.errors import ConfigError
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from hicache_storage.cli.operations.usage import Look

SUMMARY = "Show how full a store is, and with --watch how fast pages come and go."

_FOUND = 1
_MOST_LOOKS = 1_000_000_000
_TITLES = ("store", "pages", "size", "capacity", "in use")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add = parser.add_argument
    add(
        "--watch",
        type=age,
        metavar="TIME",
        help="look again each time this long has passed, such as 10s, and print what changed",
    )
    add(
        "--count",
        type=config.int_up_to(_MOST_LOOKS),
        metavar="N",
        help="with --watch, end after this many lines for each store (default: at Ctrl-C)",
    )
    add(
        "--json",
        action="store_true",
        help="print JSON instead of a table; with --watch, one document a line",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the figures. Return 1 if some key spaces cannot be read, otherwise 0."""
    choice = store_choice(arguments)
    if arguments.watch is None and arguments.count is not None:
        raise ConfigError("--count is for --watch: add --watch 10s, or leave out --count")
    if arguments.watch is not None:
        return _watch(choice, arguments)
    with meter("counting") as shown:
        look = _look(choice, arguments.tier, shown)
    from hicache_storage.cli.operations.usage import figures  # noqa: PLC0415

    stores = figures(look, None)
    if arguments.json:
        print_json(_document(choice.backend, look, stores))
    else:
        rows = [
            (
                one["store"] or arguments.tier or choice.backend,
                f"{one['pages']:,}",
                format_nbytes(one["nbytes"]),
                "" if one["capacity_nbytes"] is None else format_nbytes(one["capacity_nbytes"]),
                _share(one),
            )
            for one in stores
        ]
        print_lines(output_console(), [text_table(_TITLES, rows, "Lr")])
        _print_unreadable(look)
    return _FOUND if look.unreadable_spaces else 0


def _watch(choice: config.StorageChoice, arguments: argparse.Namespace) -> int:
    """Print the figures again and again. A store that does not answer ends it."""
    from hicache_storage.cli.operations.usage import figures  # noqa: PLC0415

    look = _look(choice, arguments.tier, Meter())
    if not arguments.json:
        _print_unreadable(look)
        write_line(
            f"{'time':20}  {'store':12} {'pages':>12} {'size':>10} {'in use':>7}"
            f" {'new/s':>8} {'gone/s':>8}"
        )
    lines = 0
    while arguments.count is None or lines < arguments.count:
        sys.stdout.flush()
        _wait(look.began_s + arguments.watch)
        before, look = look, _look(choice, arguments.tier, Meter())
        stores = figures(look, before)
        if arguments.json:
            sys.stdout.write(f"{json.dumps(_document(choice.backend, look, stores))}\n")
        else:
            for one in stores:
                whole = arguments.tier or choice.backend
                write_line(_line(format_time(look.at_s), whole, one))
        lines += 1
    return _FOUND if look.unreadable_spaces else 0


def _wait(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def _look(choice: config.StorageChoice, tier: str | None, shown: Meter) -> Look:
    """Look at the store, opened anew, because a store may note how full it is only when it is opened."""
    from hicache_storage.cli.operations.usage import look_at  # noqa: PLC0415

    with open_listed_store(choice, "stats", tier) as storage:
        return look_at(storage, shown)


def _line(at: str, whole: str, one: Mapping[str, Any]) -> str:
    new, gone = (one[name] / one["elapsed_s"] for name in ("new_pages", "gone_pages"))
    return (
        f"{at:20}  {one['store'] or whole:12} {one['pages']:>12,}"
        f" {format_nbytes(one['nbytes']):>10} {_share(one):>7} {new:>8,.1f} {gone:>8,.1f}"
    )


def _share(one: Mapping[str, Any]) -> str:
    capacity = one["capacity_nbytes"]
    return "" if capacity is None else f"{one['used_nbytes'] / capacity:.1%}"


def _document(backend: str, look: Look, stores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "backend": backend,
        "at": format_time(look.at_s),
        "unreadable_spaces": look.unreadable_spaces,
        "stores": stores,
    }


def _print_unreadable(look: Look) -> None:
    if look.unreadable_spaces:
        spaces = counted(look.unreadable_spaces, "key space")
        write_line(f"Not counted: {spaces} that cannot be read; see `hicache ls`")
