"""Wrong stores: what they do when there is no room left, or no descriptor."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.rented import Rented

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


# --- full by its own count ---------------------------------------------------------------------------


@caught_by("KV-307:a_page_twice_in_a_batch_takes_room_once", seen_in="SGLang 0.5.23, hf3fs")
class PaysTwice(DictStore):
    """A page that occurs twice in a batch gets two places, one of which is never given back."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, pages)
        with self._lock:
            self._nbytes += space.stored_nbytes * (len(hashes) - len(set(hashes)))
        return verdicts


@caught_by("KV-307:a_batch_that_does_not_fit_is_judged_page_by_page")
class SortsItsVerdicts(Rented):
    """It stores a batch in the order of its hashes, and gives the verdicts in that order."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        named = sorted(zip(hashes, contents, strict=True))
        return super()._store(space, [one for one, _ in named], [data for _, data in named])


@caught_by(
    "KV-307:a_full_store_refuses_and_stays_readable",
    "KV-307:a_batch_that_does_not_fit_is_judged_page_by_page",
    seen_in="SGLang 0.5.23, hf3fs",
)
class RaisesWhenFull(DictStore):
    """A page that has no room is an OSError."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if not super()._write_whole(space, page_hash, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True


@caught_by(
    "KV-307:a_full_store_refuses_and_stays_readable",
    "KV-307:a_batch_that_does_not_fit_is_judged_page_by_page",
)
class ForgetsToEvict(EvictingStore):
    """It counts what it holds and never evicts."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        del key, nbytes
        return True


@caught_by(
    "KV-307:deleting_makes_room_again",
    "KV-307:setting_a_present_page_takes_no_more_room",
    seen_in="an author's LMDB store",
)
class CountsWhatItDeleted(DictStore):
    """Deleted pages are counted on: a store that was full once is full for ever."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before
        return True


@caught_by("KV-307:deleting_makes_room_again")
class CountsRepeatedDeletes(DictStore):
    """Deleting a page that is gone gives room once more: the store outgrows its capacity."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before - space.stored_nbytes
        return True


@caught_by("KV-307:setting_a_present_page_takes_no_more_room")
class RefusesWhatItHas(DictStore):
    """When it is full it refuses pages that it has already."""

    def _nbytes_beside(self, key: Hashable) -> int:
        del key
        return self._nbytes

    def _drop(self, key: Hashable) -> None:
        beside = super()._nbytes_beside(key)
        super()._drop(key)
        self._nbytes = beside


# --- a full disk -------------------------------------------------------------------------------------


@caught_by("KV-307:refused_pages_leave_no_debris")
class LeavesItsTrials(Shelf):
    """A file that was begun when there was no room stays in the directory."""

    def _discard(self, temp: Path) -> None:
        pass


@caught_by(
    "KV-307:without_free_descriptors_nothing_breaks", seen_in="file backend of this project, mended"
)
class WritesWhenItReads(Shelf):
    """It writes down when a page was read last, and does not read where it can't."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._write_file(self._folder(space) / "last-read.json", page_hash.encode())
        return super()._read(space, page_hash)


# --- no descriptors ----------------------------------------------------------------------------------


@caught_by("KV-307:without_free_descriptors_nothing_breaks")
class RemembersUnreadablePages(Shelf):
    """A page that could not be opened once is taken for damaged for ever."""

    _damaged: set[Path] = own(set)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        data = super()._read(space, page_hash)
        if data is None and path.exists():
            self._damaged.add(path)
        return None if path in self._damaged else data


@caught_by("KV-307:a_disk_without_room_refuses_the_page")
class RemembersAFullDisk(Shelf):
    """A key space that could not be made when the disk was full is never tried again."""

    _given_up: set[str] = own(set)

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._given_up:
            return False
        remembered = super()._remember(space)
        if not remembered:
            self._given_up.add(space.id)
        return remembered
