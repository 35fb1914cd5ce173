"""`hicache verify`: read and verify the pages of a store, and delete the wrong ones."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.printing import output_console, print_json, print_lines, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes, share
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    label_lines,
    open_listed_store,
    open_to_change,
    store_choice,
)
from hicache_storage.composition.parts import all_parts
from hicache_storage.errors import ConfigError
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from rich.table import Table

    from hicache_storage.cli.operations.verification import Verification
    from hicache_storage.storage import HiCacheStorage

SUMMARY = "Read and check the pages of a store, and delete the wrong ones."

_FOUND = 1
_LISTED = 50
_YES = "yes"
_WIDE = 96
_WHOLE_HASH, _SHORT_HASH = 128, 40
"""How many digits of a hash are shown, on a wide terminal and in 80 columns. `inspect` takes both."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add_selection_arguments(parser)
    add = parser.add_argument
    add(
        "--sample",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="read only a share of the pages, such as 1%%, but at least one of each key space",
    )
    add(
        "--delete-wrong",
        action="store_true",
        help="delete wrong pages, after asking; engines then write them again",
    )
    add("--yes", action="store_true", help="delete without asking")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Return 0 if every page is right, otherwise 1."""
    choice = store_choice(arguments)
    asks = arguments.delete_wrong and not arguments.yes
    if arguments.yes and not arguments.delete_wrong:
        raise ConfigError("--yes is for --delete-wrong: add it, or leave out --yes")
    if asks and (arguments.json or not sys.stdin.isatty()):
        raise ConfigError("--delete-wrong asks on a terminal: use --yes if there is none")
    from hicache_storage.cli.operations.verification import Verification, verify  # noqa: PLC0415 - wrong flags fail fast

    with open_listed_store(choice, "verify", arguments.tier) as storage:
        selected = selection_of(arguments).of(storage)
        result, labels = Verification(unreadable=selected.unreadable), label_lines(storage)

        def document() -> dict[str, Any]:
            return {"backend": choice.backend, **result.as_json(), "labels": labels}

        try:
            with meter("verifying") as shown:
                verify(storage, selected.spaces, shown, result=result, share=arguments.sample)
        finally:
            if not arguments.json:
                console = output_console()
                print_lines(console, _parts(result, console.width))
                for line in labels:
                    write_line(line)
                if tiers := all_parts(storage):
                    write_line(
                        "These are the pages that engines get. --tier NAME checks the copies in one of:"
                        f" {', '.join(tiers)}"
                    )
            elif not result.is_done:
                print_json(document())
        try:
            if arguments.delete_wrong:
                reopen = partial(open_to_change, choice, arguments.tier)
                _delete_wrong(reopen, storage, result, asks=asks, quiet=arguments.json)
        finally:
            if arguments.json:
                print_json(document())
    return 0 if result.is_clean else _FOUND


def _delete_wrong(
    reopen: Callable[[], HiCacheStorage],
    look: HiCacheStorage,
    result: Verification,
    *,
    asks: bool,
    quiet: bool,
) -> None:
    from hicache_storage.cli.operations.proofs import WRONG  # noqa: PLC0415
    from hicache_storage.cli.operations.verification import delete_wrong  # noqa: PLC0415

    wrong = [finding for finding in result.findings if finding.page.proof in WRONG]
    if wrong and asks:
        sys.stdout.write(f"Delete {counted(len(wrong), 'wrong page')}? Type {_YES}: ")
        sys.stdout.flush()
        if sys.stdin.readline().strip() != _YES:
            sys.stdout.write("Nothing was deleted.\n")
            return
    try:
        if wrong:
            with reopen() as storage:
                delete_wrong(look, storage, wrong, result)
    finally:
        if not quiet:
            write_line(f"Deleted {result.deleted:,} of {counted(len(wrong), 'wrong page')}.")


def _parts(result: Verification, width: int) -> Iterator[Table | str]:
    from hicache_storage.cli.operations.proofs import Proof  # noqa: PLC0415
    from hicache_storage.cli.space_table import unreadable_lines  # noqa: PLC0415

    if result.findings:
        yield _finding_table(result, _WHOLE_HASH if width >= _WIDE else _SHORT_HASH)
    if len(result.findings) > _LISTED:
        yield f"{len(result.findings) - _LISTED:,} more: use --json to see all of them."
    others = [
        f"{count:,} {proof.value.replace('_', ' ')}"
        for proof in Proof
        if proof is not Proof.OK and (count := result.proofs[proof])
    ]
    yield from unreadable_lines(result.unreadable)
    if result.misplaced:
        where = [f"{counted(pages, 'page')} in {name}" for name, pages in result.misplaced.items()]
        yield (
            f"misplaced: {', '.join(where)}: they belong in other stripes, where engines look for them."
            " To move them, run `hicache copy` with this store as source and target"
        )
    speed = format_nbytes(result.nbytes / max(result.elapsed_s, 1e-9))
    yield (
        f"{counted(result.pages, 'page')}, {format_nbytes(result.nbytes)} in {result.elapsed_s:.1f} s"
        f" ({speed}/s): {', '.join([f'{result.proofs[Proof.OK]:,} ok', *others])}"
    )


def _finding_table(result: Verification, digits: int) -> Table:
    from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS  # noqa: PLC0415

    ordered = sorted(result.findings, key=lambda one: (one.page.proof.value, one.space.id))
    rows = [
        (
            finding.space.id[:SHORT_ID_DIGITS],
            finding.page.proof.value.replace("_", " "),
            finding.page.page_hash[:digits],
        )
        for finding in ordered[:_LISTED]
    ]
    is_cut = any(len(finding.page.page_hash) > digits for finding in ordered[:_LISTED])
    title = f"page: the first {digits} digits" if is_cut else "page"
    return text_table(("space", "reason", title), rows)
