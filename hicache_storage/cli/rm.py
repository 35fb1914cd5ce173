"""`hicache rm`: remove single pages by their hashes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_storage.cli.printing import print_json, write_line
from hicache_storage.cli.sizes import counted
from hicache_storage.cli.stderr_log import stderr_log
from hicache_storage.cli.stores import (
    add_store_arguments,
    add_tier_argument,
    open_listed_store,
    open_to_change,
    store_choice,
)
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

SUMMARY = "Remove single pages of a key space."

_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_store_arguments(parser)
    add_tier_argument(parser)
    add = parser.add_argument
    add("space", metavar="SPACE", help="the first digits of a key space's id")
    add("hash", nargs="+", metavar="HASH", help="the first digits of a page's hash")
    add(
        "--yes",
        action="store_true",
        help="remove them; without this flag, rm only shows what it would remove",
    )
    add("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the pages. Return 0 if all of them are gone, otherwise 1."""
    choice = store_choice(arguments)
    from hicache_storage.cli.operations.selection import find_pages, find_space  # noqa: PLC0415 - wrong flags fail fast

    removed: list[str] = []
    with open_listed_store(choice, "rm", arguments.tier) as look:
        space = find_space(look, arguments.space)
        hashes = find_pages(look, space, arguments.hash)
        if arguments.yes:
            with open_to_change(choice, arguments.tier) as storage:
                try:
                    gone = storage.batch_delete(space, hashes)
                except BaseException:
                    _tell_what_is_left(look, space, hashes)
                    raise
            removed = [one for one, is_gone in zip(hashes, gone, strict=True) if is_gone]
    kept = [one for one in hashes if one not in removed]
    if arguments.json:
        document = {"backend": choice.backend, "space": space.id, "pages": hashes}
        print_json({**document, "removed_pages": len(removed), "kept": kept})
    else:
        _print(space.id, removed, kept, is_done=arguments.yes)
    return _FOUND if kept else 0


def _tell_what_is_left(look: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> None:
    """Print how many of the pages are still there, after a removal that did not end."""
    with suppress(HiCacheError):
        left = sum(look.batch_exists(space, hashes)) + sum(1 for _ in look.faults(space, hashes))
        stderr_log().print_info(f"{left:,} of {counted(len(hashes), 'page')} are left")


def _print(space_id: str, removed: Sequence[str], kept: Sequence[str], *, is_done: bool) -> None:
    if not is_done:
        for page_hash in kept:
            write_line(page_hash)
        write_line("Nothing was removed. Use --yes to remove them.")
        return
    write_line(f"{counted(len(removed), 'page')} of key space {space_id} removed")
    for page_hash in kept:
        write_line(f"the store could not remove page {page_hash}: try again later")
