"""`hicache gc`: remove key spaces by model, revision, tenant, pool, or time without use."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from hicache_storage.cli.ages import age, format_time
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.cli.stores import (
    add_store_arguments,
    open_existing_store,
    require_listing,
    store_choice,
)
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hicache_storage.cli.operations.collection import Candidate

SUMMARY = "Remove key spaces by model, revision, tenant, pool, or time without use."

_FOUND = 1
_SELECTIONS = ("space", "model", "revision", "tenant", "pool", "unused_for")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_selection_arguments(parser, default="at least one of these, or --unused-for")
    add = parser.add_argument
    add(
        "--unused-for",
        type=age,
        metavar="AGE",
        help="only key spaces of which no page was used for so long, such as 1d; file and hf3fs with"
        " a capacity know it",
    )
    add("--yes", action="store_true", help="remove; without it the verb only shows what would go")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what goes. Return 1 if something would go and stays, for want of `--yes`, else 0."""
    choice = store_choice(arguments)
    if all(getattr(arguments, name) is None for name in _SELECTIONS):
        raise ConfigError(
            "gc: select key spaces: --space, --model, --revision, --tenant, --pool or --unused-for"
        )
    from hicache_storage.cli.operations.collection import Removal, candidates, remove  # noqa: PLC0415 - wrong flags fail fast
    from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS  # noqa: PLC0415

    unused_s: float | None = arguments.unused_for
    used_before_s = None if unused_s is None else time.time() - unused_s
    with open_existing_store(choice) as storage:
        require_listing(storage, choice.backend, "gc")
        spaces = selection_of(arguments).of(storage.spaces())
        with meter("looking") as shown:
            found = list(candidates(storage, spaces, shown, used_before_s=used_before_s))
        if not arguments.json:
            _print(found)
        removal = Removal()
        if arguments.yes:
            with meter("removing") as shown:
                removal = remove(storage, found, shown, used_before_s=used_before_s)
    if arguments.json:
        document = {
            "backend": choice.backend,
            "spaces": [candidate.as_json() for candidate in found],
            "removed_pages": removal.pages,
            "kept": [space.id for space in removal.kept],
        }
        json.dump(document, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif arguments.yes:
        sys.stdout.write(
            f"{counted(removal.pages, 'page')} {'was' if removal.pages == 1 else 'were'} removed.\n"
        )
        sys.stdout.writelines(
            f"Key space {space.id[:SHORT_ID_DIGITS]} was kept: it was used meanwhile.\n"
            for space in removal.kept
        )
    elif found:
        sys.stdout.write("Nothing was removed: give --yes to remove them.\n")
    return _FOUND if found and not arguments.yes else 0


def _print(found: Sequence[Candidate]) -> None:
    from hicache_storage.cli.printing import output_console, print_lines  # noqa: PLC0415
    from hicache_storage.cli.space_table import space_table  # noqa: PLC0415

    usages = [candidate.usage for candidate in found]
    used = [candidate.used_at_s for candidate in found if candidate.used_at_s is not None]
    pages = sum(usage.pages or 0 for usage in usages)
    nbytes = sum(usage.nbytes or 0 for usage in usages)
    last = f"; the last use was {format_time(max(used))}" if used else ""
    spaces = counted(len(usages), "key space")
    total = f"{spaces}, {counted(pages, 'page')}, {format_nbytes(nbytes)}{last}"
    print_lines(output_console(), [space_table(usages), total] if usages else [total])
