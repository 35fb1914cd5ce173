"""Wrong stores: opened read-only, they change something; KV-308."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.evicting_shelf import EvictingShelf
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from hicache_conformance.selftest.references.evicting_shelf import EvictingShelfSettings
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace


@caught_by("KV-308:looking_changes_nothing")
class LooksWithALock(Shelf):
    """Whoever opens it leaves the file of a lock, also to look."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        (self._root / ".lock").touch()


@caught_by("KV-308:looking_changes_nothing")
class LookingIsAUse(EvictingShelf):
    """A get renews a page, whoever makes it."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._note_use(self._path(space, page_hash))
        return super()._read(space, page_hash)


@caught_by("KV-308:asking_for_what_is_not_there_makes_nothing")
class LookingMakesFolders(Shelf):
    """A look-up makes the folder of a key space that has none."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        self._folder(space).mkdir(exist_ok=True)
        return super()._has(space, page_hash)


@caught_by("KV-308:looking_at_a_full_store_evicts_nothing")
class LookingEvicts(EvictingShelf):
    """Opening it applies its capacity, also to look."""

    def __init__(self, settings: EvictingShelfSettings) -> None:
        super().__init__(settings)
        self._evict(0)


@caught_by("KV-308:damage_stays_for_others_to_see")
class LookingHeals(Shelf):
    """A get removes a file of a wrong length, also to look."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and not self._is_whole(space, data):
            self._removed(space, page_hash)
        return data
