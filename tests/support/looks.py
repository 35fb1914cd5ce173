"""A walk through every call that only looks, and a record of a directory before and after it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pages import blank

from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage


def recorded(root: Path) -> dict[str, tuple[bytes, int] | None]:
    """Return contents and write time of each file below `root` by its path. None: a directory."""
    return {
        str(path.relative_to(root)): (
            (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        )
        for path in root.rglob("*")
    }


def look_everywhere(storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> None:
    """Call all that a verb may call that only looks, and all that a read-only storage refuses."""
    storage.open_space(space)
    for found in {space, *storage.spaces()}:
        listed = [info.page_hash for info in storage.scan(found)]
        for some in (hashes, listed):
            storage.batch_exists(found, some)
            storage.batch_get(found, some, [blank(found.stored_nbytes) for _ in some])
            storage.page_times(found, some)
            list(storage.faults(found, some))
        list(storage.faults(found))
        with suppress(UnsupportedOperation):
            storage.clear(found)
        with suppress(UnsupportedOperation):
            storage.batch_delete(found, hashes)
    for unreadable in storage.unreadable_spaces():
        with suppress(UnsupportedOperation):
            storage.remove_space(unreadable.space_id)
    storage.diagnose()
    storage.stats()
