"""`hicache diff`: compare the pages of two stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.cli.printing import output_console, print_json, print_lines, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted
from hicache_storage.cli.stores import (
    TO_TIER,
    add_store_arguments,
    add_target_arguments,
    add_tier_argument,
    open_listed_store,
    same_store,
    source_and_target,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from hicache_storage.cli.operations.difference import Differences, SpaceDifference

SUMMARY = "Compare two stores: which pages only one of them has, and which are wrong."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add_target_arguments(parser)
    add_selection_arguments(parser)
    add = parser.add_argument
    add(
        "--verify",
        action="store_true",
        help="read and check all pages of both stores, instead of only listing them",
    )
    add(
        "--list",
        action="store_true",
        help="print a line for each page that differs, instead of a table; with --json, add the pages",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Return 0 if there are none, otherwise 1."""
    choice, target_choice, is_same = source_and_target(arguments, "diff")
    if is_same:
        raise same_store("diff")
    from hicache_storage.cli.operations.difference import (  # noqa: PLC0415 - wrong flags fail fast
        Differences,
        compare,
        select_pairs,
    )

    with (
        open_listed_store(choice, "diff", arguments.tier) as source,
        open_listed_store(target_choice, "diff", arguments.to_tier, flag=TO_TIER) as target,
    ):
        compared = select_pairs(source, target, selection_of(arguments))
        total, found = Differences(unreadable=compared.unreadable), list["SpaceDifference"]()
        with meter("comparing") as shown:
            for one in compare(source, target, compared.pairs, shown, reads=arguments.verify):
                total.add(one)
                found.append(one)
    if arguments.json:
        print_json(
            {
                "from": choice.backend,
                "to": target_choice.backend,
                "is_verified": arguments.verify,
                "spaces": [one.as_json(listed=arguments.list) for one in found],
                **total.as_json(),
            }
        )
    elif arguments.list:
        _print_pages(found)
        for line in _unreadable(total):
            write_line(line)
    else:
        console = output_console()
        print_lines(console, _parts(found, total, console.width))
    return 0 if total.is_none else _FOUND


def _print_pages(found: Sequence[SpaceDifference]) -> None:
    """Print a line for each page that differs, with the sign that `diff` gives it."""
    for one in found:
        space_id = one.pair.either.id
        for side, sign in (("source", "<"), ("target", ">")):
            for page_hash in one.only[side]:
                write_line(f"{sign} {space_id} {page_hash}")
            for page in one.wrong[side]:
                write_line(f"! {space_id} {page.page_hash} {page.proof.value} in the {side}")


def _parts(
    found: Sequence[SpaceDifference], total: Differences, width: int
) -> Iterator[Table | str]:
    from hicache_storage.cli.operations.difference import SIDES  # noqa: PLC0415
    from hicache_storage.cli.operations.selection import SpaceUsage  # noqa: PLC0415
    from hicache_storage.cli.space_table import space_parts  # noqa: PLC0415

    usages = [
        SpaceUsage(
            one.pair.either,
            None,
            None,
            {
                "both": (one.both, 0),
                "only source": (len(one.only["source"]), 0),
                "only target": (len(one.only["target"]), 0),
            },
        )
        for one in found
    ]
    yield from space_parts(usages, width)
    yield from _unreadable(total)
    for side in SIDES:
        for reason, pages in total.wrong[side].items():
            yield f"{side}: {counted(pages, 'page')} {reason.replace('_', ' ')}"
    yield (
        f"{counted(len(found), 'key space')}: {counted(total.both, 'page')} in both,"
        f" {total.only['source']:,} only in the source, {total.only['target']:,} only in the target"
    )


def _unreadable(total: Differences) -> Iterator[str]:
    from hicache_storage.cli.space_table import unreadable_lines  # noqa: PLC0415

    for side, spaces in total.unreadable.items():
        yield from (f"{side}: {line}" for line in unreadable_lines(spaces))
