"""Stores that clear too much or too little."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from pathlib import Path

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo


class _ClearsMore(DictStore):
    """A store that clears every key space that it takes for the one that it was told to."""

    def clear(self, space: KeySpace) -> int:
        for other in self._known_spaces():
            if other != space and self._is_meant(other, space):
                super().clear(other)
        return super().clear(space)

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        raise NotImplementedError


@caught_by(
    "KV-103:clear_spares_neighbours",
    "KV-103:clear_spares_look_alikes",
    seen_in="an author's LMDB store",
)
class ClearsByNamePrefix(_ClearsMore):
    """Clearing a model clears those whose names begin with its own."""

    def _is_meant(self, other: KeySpace, space: KeySpace) -> bool:
        return other.model.startswith(space.model)


@caught_by("KV-103:clear_spares_other_programs_files", seen_in="SGLang 0.5.23, file")
class ClearsTheDirectory(Shelf):
    """Clearing removes every file and folder that lies in the store's directory, beside its own."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for path in self._root.iterdir():
            if not re.fullmatch(r"[0-9a-f]{32}", path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return removed


@caught_by("KV-103:clear_spares_another_stores_pages")
class ClearsNextDoor(Shelf):
    """Clearing goes through all directories beside the store's own: other stores of one parent."""

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for folder in self._root.parent.glob(f"*/{space.id}"):
            shutil.rmtree(folder)
        return removed


@caught_by("KV-103:clear_counts_the_pages_that_it_removed")
class ClearCountsSets(DictStore):
    """Clear counts sets, not pages: one that was set again counts twice."""

    _set_count: Counter[KeySpace] = own(Counter)

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._set_count[stored.space] += 1

    def clear(self, space: KeySpace) -> int:
        super().clear(space)
        return self._set_count.pop(space, 0)


@caught_by("KV-103:a_cleared_space_starts_anew")
class ClearBarsThePages(DictStore):
    """Clear bars the pages that were there, and a later set does not lift the bar."""

    _barred: set[Hashable] = own(set)

    def clear(self, space: KeySpace) -> int:
        removed = 0
        for info in list(self.scan(space)):
            self._barred.add(self._key(space, info.page_hash))
            removed += 1
        return removed

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        barred = self._key(space, page_hash) in self._barred
        return None if barred else super()._read(space, page_hash)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        return [info for info in names if self._key(space, info.page_hash) not in self._barred]


@caught_by("KV-103:clear_reaches_other_handles", "KV-103:what_was_cleared_stays_cleared")
class ClearIsForgotten(Shelf):
    """Clear hides the pages in this instance only: reopened, they are back."""

    _hidden: set[Hashable] = own(set)

    def clear(self, space: KeySpace) -> int:
        names = [(space, info.page_hash) for info in self.scan(space)]
        self._hidden.update(names)
        return len(names)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._hidden.discard((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return None if (space, page_hash) in self._hidden else super()._read(space, page_hash)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return (space, page_hash) not in self._hidden and super()._has(space, page_hash)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        names = super()._names(space)
        return [info for info in names if (space, info.page_hash) not in self._hidden]


@caught_by("KV-103:another_handle_clears_what_the_first_set")
class ClearsItsOwnOnly(Shelf):
    """A handle clears the pages that it has set itself."""

    _own: set[tuple[KeySpace, str]] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)

    def clear(self, space: KeySpace) -> int:
        own = [name for home, name in self._own if home == space and self._has(space, name)]
        return sum(self.batch_delete(space, own))


_STEP = 64


# --- KV-103 ------------------------------------------------------------------------------------------


@caught_by(
    "KV-103:a_clear_that_is_cut_short_says_so", seen_in="redis backend of this project, mended"
)
class ClearStopsInSilence(WireStore):
    """A clear whose connection breaks ends there, and returns what it has removed until then."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            try:
                removed += sum(self.batch_delete(space, hashes[start : start + _STEP]))
            except StorageUnavailable:
                break
        return removed


@caught_by("KV-103:a_clear_without_descriptors_says_so")
class ClearsWhatItCanList(Shelf):
    """A directory that can't be listed is taken for an empty one, and clear returns 0."""

    def _entries(self, folder: Path, name: re.Pattern[str]) -> Iterator[Path]:
        try:
            return super()._entries(folder, name)
        except StorageUnavailable:
            return iter(())


@caught_by("KV-103:clear_removes_every_page")
class ClearCountsItsLastBatch(DictStore):
    """Clear goes in batches of 64 and returns the count of the last one."""

    def clear(self, space: KeySpace) -> int:
        hashes = [info.page_hash for info in self.scan(space)]
        removed = 0
        for start in range(0, len(hashes), _STEP):
            removed = sum(self.batch_delete(space, hashes[start : start + _STEP]))
        return removed


@caught_by("KV-103:clear_gives_its_room_back")
class ClearFreesNoRoom(DictStore):
    """Clear removes the pages, and their bytes are counted for ever."""

    def clear(self, space: KeySpace) -> int:
        nbytes = self._nbytes
        removed = super().clear(space)
        self._nbytes = nbytes
        return removed


# --- KV-104 ------------------------------------------------------------------------------------------


@caught_by("KV-104:a_paused_listing_pins_no_room", seen_in="an author's LMDB store")
class ListingsPinRoom(DictStore):
    """A scan is one read transaction: what is deleted meanwhile takes room until it has ended."""

    _listings = 0
    _pinned_nbytes = 0

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return self._pinning(self._names(space))

    def _pinning(self, infos: list[PageInfo]) -> Iterator[PageInfo]:
        self._listings += 1
        try:
            yield from infos
        finally:
            self._listings -= 1
            self._pinned_nbytes = self._pinned_nbytes if self._listings else 0

    def _drop(self, key: Hashable) -> None:
        before = self._nbytes
        super()._drop(key)
        if self._listings:
            self._pinned_nbytes += before - self._nbytes

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return super()._make_room(key, nbytes + self._pinned_nbytes)
