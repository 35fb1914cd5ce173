"""`hicache copy`: copy the pages of one store to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.cli.printing import print_json, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes, size
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_target_arguments,
    add_tier_argument,
    open_listed_store,
    open_to_change,
    source_and_target,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from hicache_storage.cli.operations.copying import Copied

SUMMARY = "Copy the pages of one store to another: to migrate, to warm up, to back up."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add_target_arguments(parser)
    add_selection_arguments(parser)
    add = parser.add_argument
    add(
        "--bandwidth-limit",
        type=size,
        metavar="BYTES",
        help="copy at most this many bytes a second, such as 200MiB",
    )
    add("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures. Return 0 if the target has every page of the source, otherwise 1."""
    choice, target_choice = source_and_target(arguments, "copy")
    from hicache_storage.cli.operations.copying import Copied, copy  # noqa: PLC0415 - wrong flags fail fast
    from hicache_storage.cli.operations.rate_limit import RateLimit  # noqa: PLC0415

    limit, result = RateLimit(arguments.bandwidth_limit), Copied()
    with open_listed_store(choice, "copy", arguments.tier) as source:
        selected = selection_of(arguments).of(source)
        result.unreadable = selected.unreadable
        with open_to_change(target_choice, arguments.to_tier, flag="--to-tier") as target:
            is_done = False
            try:
                with meter("copying") as shown:
                    copy(source, target, selected.spaces, shown, limit, result=result)
                is_done = True
            finally:
                names = {"from": choice.backend, "to": target_choice.backend, "is_done": is_done}
                _print({**names, **result.as_json()} if arguments.json else None, result)
    return 0 if result.is_whole else _FOUND


def _print(document: dict[str, Any] | None, result: Copied) -> None:
    """Print the figures, even of a copy that failed or was interrupted, because it can be continued."""
    if document is not None:
        print_json(document)
        return
    for line in _lines(result):
        write_line(line)


def _lines(result: Copied) -> Iterator[str]:
    from hicache_storage.cli.space_table import unreadable_lines  # noqa: PLC0415

    speed = format_nbytes(result.nbytes / max(result.elapsed_s, 1e-9))
    yield (
        f"{counted(result.copied, 'page')} copied, {format_nbytes(result.nbytes)} in"
        f" {result.elapsed_s:.1f} s ({speed}/s); {result.skipped:,} already there"
    )
    for proof, count in result.not_proved.items():
        yield f"not copied: {counted(count, 'page')} ({proof.value.replace('_', ' ')})"
    if result.refused:
        yield f"refused by the target, which may be full: {counted(result.refused, 'page')}"
    if result.is_given_up:
        yield "the copy stopped there, because the target took none of the last pages"
    yield from unreadable_lines(result.unreadable)
    for space in result.unframed_spaces:
        yield (
            f"key space {space.id} was not copied, because its pages have no frames to check them"
            " by"
        )
