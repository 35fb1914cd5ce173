"""`hicache gc`: remove key spaces by model, revision, tenant, pool, or age."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from hicache_storage.cli.ages import age, format_time
from hicache_storage.cli.printing import output_console, print_json, print_lines, write_line
from hicache_storage.cli.progress import meter
from hicache_storage.cli.selection_flags import add_selection_arguments, selection_of
from hicache_storage.cli.sizes import counted, format_nbytes
from hicache_storage.cli.stderr_log import stderr_log
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    open_listed_store,
    open_to_change,
    store_choice,
)
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hicache_storage.cli.operations.collection import Candidate, Removal
    from hicache_storage.storage import UnreadableSpace

SUMMARY = "Remove key spaces by model, revision, tenant, pool, or age."

_FOUND = 1
_WITH_YES = "Use --yes to remove them"
_BY_NAME = "Name those to remove with --space, because a wrong key may be why none can be read"
_FIELDS = ("model", "revision", "tenant", "pool", "unused_for", "older_than")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add_selection_arguments(
        parser,
        default="give at least one of these, or --unused-for, --older-than, --empty or --unreadable",
    )
    add = parser.add_argument
    add(
        "--unused-for",
        type=age,
        metavar="AGE",
        help="only key spaces without a used page for this long, such as 1d; for stores that record"
        " uses, as file and hf3fs do if they have a capacity",
    )
    add(
        "--older-than",
        type=age,
        metavar="AGE",
        help="only key spaces in which no page was written for this long, even if pages are still read;"
        " for stores that record writes, such as file, hf3fs and s3",
    )
    add("--empty", action="store_true", help="only key spaces that hold no pages")
    add(
        "--unreadable",
        action="store_true",
        help="key spaces whose names cannot be read, with their pages; can be combined with --space"
        " only",
    )
    add(
        "--yes",
        action="store_true",
        help="remove them; without this flag, gc only shows what it would remove",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what is removed. Return 1 if a key space that you may have meant was kept, otherwise 0."""
    choice = store_choice(arguments)
    _check_selection(arguments)
    from hicache_storage.cli.operations.collection import (  # noqa: PLC0415 - wrong flags fail fast
        Candidate,
        Removal,
        Wanted,
        removable,
        remove,
    )

    wanted = Wanted(
        used_before_s=_time_before(arguments.unused_for),
        written_before_s=_time_before(arguments.older_than),
        is_empty=arguments.empty,
    )
    with open_listed_store(choice, "gc", arguments.tier) as look:
        selected = selection_of(arguments).of(look)
        spaces = [] if arguments.unreadable else selected.spaces
        with meter("looking") as shown:
            looked = [*wanted.found(look, spaces, shown)]
        found = [one for one in looked if isinstance(one, Candidate)]
        removal = Removal(kept=[one for one in looked if not isinstance(one, Candidate)])
        unreadable, kept = removable(look, selected.unreadable if arguments.unreadable else [])
        removal.kept += kept
        is_doubtful = bool(unreadable) and not (selected.spaces or arguments.space)
        if is_doubtful and arguments.yes:
            raise ConfigError(
                f"gc: none of {len(unreadable):,} key spaces can be read, perhaps because of a wrong"
                " key: name the ones to remove with --space"
            )
        goes: list[Candidate | UnreadableSpace] = [*found, *unreadable]
        if not arguments.json:
            _print(goes, selected.unreadable)
        try:
            if arguments.yes and goes:
                with open_to_change(choice, arguments.tier) as storage, meter("removing") as shown:
                    remove(look, storage, goes, wanted, removal, meter=shown, tell=_tell)
        finally:
            stays = bool(goes) and not arguments.yes
            if arguments.json:
                _print_json(choice.backend, found, selected.unreadable, removal)
            else:
                _print_removal(
                    removal,
                    is_done=arguments.yes,
                    how=(_BY_NAME if is_doubtful else _WITH_YES) if stays else "",
                )
    left = [] if arguments.unreadable else selected.unreadable
    doubts = [one for one in removal.kept if one.is_doubt]
    return _FOUND if stays or left or doubts else 0


def _check_selection(arguments: argparse.Namespace) -> None:
    is_field_given = any(getattr(arguments, name) is not None for name in _FIELDS)
    if arguments.unreadable and (is_field_given or arguments.empty):
        raise ConfigError(
            "gc: --unreadable can be combined with --space only, because nothing else about these"
            " key spaces can be read"
        )
    if not (is_field_given or arguments.space or arguments.empty or arguments.unreadable):
        raise ConfigError(
            "gc: select key spaces with --space, --model, --revision, --tenant, --pool,"
            " --unused-for, --older-than, --empty or --unreadable"
        )


def _time_before(age_s: float | None) -> float | None:
    return None if age_s is None else time.time() - age_s


def _tell(space_id: str, pages: int) -> None:
    """Print each key space as soon as it is removed, because removing them all may take minutes."""
    stderr_log().print_info(f"removed key space {space_id} with {counted(pages, 'page')}")


def _print_json(
    backend: str,
    found: Sequence[Candidate],
    unreadable: Sequence[UnreadableSpace],
    removal: Removal,
) -> None:
    """Print the document, even if the removal failed."""
    document = {
        "backend": backend,
        "spaces": [candidate.as_json() for candidate in found],
        "unreadable_spaces": [asdict(one) for one in unreadable],
        "removed_spaces": removal.spaces,
        "removed_pages": removal.pages,
        "kept": [one.space_id for one in removal.kept],
        "reasons": {one.space_id: one.reason for one in removal.kept},
    }
    print_json(document)


def _print(
    goes: Sequence[Candidate | UnreadableSpace], unreadable: Sequence[UnreadableSpace]
) -> None:
    from hicache_storage.cli.operations.collection import Candidate  # noqa: PLC0415
    from hicache_storage.cli.space_table import space_parts, unreadable_lines  # noqa: PLC0415

    found = [one for one in goes if isinstance(one, Candidate)]
    usages = [candidate.usage for candidate in found]
    used = [candidate.used_at_s for candidate in found if candidate.used_at_s is not None]
    pages = sum(usage.pages or 0 for usage in usages)
    nbytes = sum(usage.nbytes or 0 for usage in usages)
    written = [one.written_at_s for one in found if one.written_at_s is not None]
    last = f"; none was used after {format_time(max(used))}" if used else ""
    last += f"; none was written after {format_time(max(written))}" if written else ""
    spaces = counted(len(usages), "key space")
    total = f"{spaces}, {counted(pages, 'page')}, {format_nbytes(nbytes)}{last}"
    if goes and not found:  # the store does not list their pages
        total = f"{counted(len(goes), 'key space')} that cannot be read"
    console = output_console()
    parts = [*space_parts(usages, console.width), *unreadable_lines(unreadable), total]
    print_lines(console, parts)


def _print_removal(removal: Removal, *, is_done: bool, how: str) -> None:
    """Print what was removed, or else `how` to remove it if anything was found."""
    from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS  # noqa: PLC0415

    if is_done:
        spaces, pages = counted(removal.spaces, "key space"), counted(removal.pages, "page")
        write_line(f"Removed {spaces} with {pages}.")
    elif how:
        write_line(f"Nothing was removed. {how}.")
    for one in removal.kept:
        write_line(f"Key space {one.space_id[:SHORT_ID_DIGITS]} was kept: {one.reason}.")
