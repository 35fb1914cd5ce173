"""`hicache verify`: read and prove the pages of a store, and delete the wrong ones."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes, share
from hicache_storage.cli.stores import (
    add_store_arguments,
    open_existing_store,
    require_listing,
    store_choice,
)
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.table import Table

    from hicache_storage.cli.operations.verification import Verification
    from hicache_storage.storage import HiCacheStorage

SUMMARY = "Read and prove the pages of a store, and delete the wrong ones."

_FOUND = 1
_LISTED = 50
_YES = "yes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_selection_arguments(parser)
    add = parser.add_argument
    add("--sample", type=share, default=1.0, metavar="SHARE", help="read a share, such as 1%%")
    add(
        "--delete-wrong",
        action="store_true",
        help="delete wrong pages, after a question; engines then write them again",
    )
    add("--yes", action="store_true", help="delete without a question")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. Return 0 if every page was proved, else 1."""
    choice = store_choice(arguments)
    asks = arguments.delete_wrong and not arguments.yes
    if asks and (arguments.json or not sys.stdin.isatty()):
        raise ConfigError("--delete-wrong asks on a terminal: give --yes where there is none")
    from hicache_storage.cli.operations.verification import verify  # noqa: PLC0415 - wrong flags fail fast

    with open_existing_store(choice) as storage:
        require_listing(storage, choice.backend, "verify")
        spaces = selection_of(arguments).of(storage.spaces())
        with meter("verifying") as shown:
            result = verify(storage, spaces, shown, share=arguments.sample)
        if not arguments.json:
            _print(result)
        if arguments.delete_wrong:
            _delete_wrong(storage, result, asks=asks, quiet=arguments.json)
    if arguments.json:
        json.dump({"backend": choice.backend, **result.as_json()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    return 0 if result.is_clean else _FOUND


def _delete_wrong(
    storage: HiCacheStorage, result: Verification, *, asks: bool, quiet: bool
) -> None:
    from hicache_storage.cli.operations.proofs import WRONG  # noqa: PLC0415
    from hicache_storage.cli.operations.verification import delete_wrong  # noqa: PLC0415

    wrong = [finding for finding in result.findings if finding.page.proof in WRONG]
    if wrong and asks:
        sys.stdout.write(f"Delete {len(wrong):,} wrong pages? Type {_YES}: ")
        sys.stdout.flush()
        if sys.stdin.readline().strip() != _YES:
            sys.stdout.write("Nothing was deleted.\n")
            return
    result.deleted = delete_wrong(storage, wrong)
    if not quiet:
        sys.stdout.write(f"{result.deleted:,} wrong pages were deleted.\n")


def _print(result: Verification) -> None:
    from hicache_storage.cli.printing import output_console, print_lines  # noqa: PLC0415

    print_lines(output_console(), _parts(result))


def _parts(result: Verification) -> Iterator[Table | str]:
    from hicache_storage.cli.operations.proofs import Proof  # noqa: PLC0415

    if result.findings:
        yield _finding_table(result)
    if len(result.findings) > _LISTED:
        yield f"{len(result.findings) - _LISTED:,} more are in --json."
    others = [
        f"{count:,} {proof.value.replace('_', ' ')}"
        for proof in Proof
        if proof is not Proof.OK and (count := result.proofs[proof])
    ]
    if result.healed:
        others.append(f"{result.healed:,} damaged and removed by the store itself")
    speed = format_nbytes(result.nbytes / max(result.elapsed_s, 1e-9))
    yield (
        f"{counted(result.pages, 'page')}, {format_nbytes(result.nbytes)} in {result.elapsed_s:.1f} s"
        f" ({speed}/s): {', '.join([f'{result.proofs[Proof.OK]:,} ok', *others])}"
    )


def _finding_table(result: Verification) -> Table:
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("space", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("page", overflow="fold")
    ordered = sorted(result.findings, key=lambda one: (one.page.proof.value, one.space.id))
    for finding in ordered[:_LISTED]:
        page = finding.page
        table.add_row(
            finding.space.id[:SHORT_ID_DIGITS], page.proof.value.replace("_", " "), page.page_hash
        )
    return table
