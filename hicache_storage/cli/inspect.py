"""`hicache inspect`: show a key space's manifest, or a page's frame and whether the page is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from hicache_storage.cli.ages import with_age
from hicache_storage.cli.escapes import escaped
from hicache_storage.cli.printing import output_console, print_json, print_lines
from hicache_storage.cli.sizes import format_nbytes
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    open_listed_store,
    store_choice,
)
from hicache_storage.text_tables import fact_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

SUMMARY = "Show the manifest of a key space, or the frame and the proof of one page."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add = parser.add_argument
    add("space", metavar="SPACE", help="the first digits of a key space's id")
    add("hash", nargs="?", metavar="HASH", help="the first digits of a page's hash")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts. Return 0, or 1 if the page is missing or wrong."""
    choice = store_choice(arguments)
    from hicache_storage.cli.operations.inspection import page_facts, space_facts  # noqa: PLC0415 - wrong flags fail fast
    from hicache_storage.cli.operations.selection import find_page, find_space  # noqa: PLC0415

    with open_listed_store(choice, "inspect", arguments.tier) as storage:
        space = find_space(storage, arguments.space)
        if arguments.hash is None:
            facts, is_right = space_facts(storage, space), True
        else:
            page_hash = find_page(storage, space, arguments.hash)
            facts, is_right = page_facts(storage, space, page_hash)
    if arguments.json:
        print_json(facts)
    else:
        rows = [
            (escaped(name.removesuffix("_nbytes").replace("_", " ")), escaped(value))
            for name, value in _rows(facts)
        ]
        print_lines(output_console(), [fact_table(rows)])
    return 0 if is_right else _FOUND


def _rows(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _rows(cast("dict[str, Any]", value), f"{name} ")
        elif value not in ("", None):
            rows.append((prefix + name, _text(name, value)))
    return rows


def _text(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        size = f" ({format_nbytes(value)})" if name.endswith("nbytes") and value > 999 else ""
        return f"{value:,}{size}"
    if isinstance(value, list):
        return " to ".join(map(str, cast("Sequence[object]", value)))
    return with_age(value) if isinstance(value, str) and name.endswith("_at") else str(value)
