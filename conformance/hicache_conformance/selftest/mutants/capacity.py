"""Wrong stores: what they do when there is no room left, or no descriptor."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


# --- full by its own count ---------------------------------------------------------------------------


@caught_by("KV-307", check="a_page_twice_in_a_batch_takes_room_once")
class PaysTwice(DictStore):
    """A page that occurs twice in a batch gets two places, one of which is never given back (SGLang)."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, pages)
        with self._lock:
            self._nbytes += space.stored_nbytes * (len(hashes) - len(set(hashes)))
        return verdicts


@caught_by("KV-307")
class RaisesWhenFull(DictStore):
    """A page that has no room is an OSError."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if not super()._write_whole(space, page_hash, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True


@caught_by("KV-307")
class SaysYesWhenFull(DictStore):
    """A page that has no room is dropped, and its set is True."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        super()._write_whole(space, page_hash, data)
        return True


@caught_by("KV-307")
class ThrowsOutWhenFull(DictStore):
    """It claims to keep pages until they are deleted, and throws out the oldest when it is full."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        while not super()._make_room(key, nbytes) and self._pages:
            self._drop(next(iter(self._pages)))
        return True


@caught_by("KV-307")
class HasNoLimit(DictStore):
    """It takes a capacity in its config, and does not keep to it."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        del key, nbytes
        return True


@caught_by("KV-307")
class ForgetsToEvict(EvictingStore):
    """It counts what it holds and never evicts."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        del key, nbytes
        return True


@caught_by("KV-307")
class CountsWhatItDeleted(DictStore):
    """Deleted pages are counted on: a store that was full once is full for ever."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before
        return True


@caught_by("KV-307")
class CountsRepeatedDeletes(DictStore):
    """Deleting a page that is gone gives room once more: the store outgrows its capacity."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        before = self._nbytes
        super()._removed(space, page_hash)
        self._nbytes = before - space.stored_nbytes
        return True


@caught_by("KV-307")
class CountsRepeatedSets(DictStore):
    """Setting a present page is counted as if it were one more."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        before = self._nbytes
        super()._put(key, stored)
        self._nbytes = before + len(stored.data)


@caught_by("KV-307")
class CountsWhatItRefused(DictStore):
    """A page that is refused has been counted already, and stays counted."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        fits = super()._make_room(key, nbytes)
        self._nbytes += 0 if fits else nbytes
        return fits


@caught_by("KV-307")
class RefusesWhatItHas(DictStore):
    """When it is full it refuses pages that it has already."""

    def _nbytes_beside(self, key: Hashable) -> int:
        del key
        return self._nbytes

    def _drop(self, key: Hashable) -> None:
        beside = super()._nbytes_beside(key)
        super()._drop(key)
        self._nbytes = beside


@caught_by("KV-307")
class JudgesTheBatchAsAWhole(DictStore):
    """Where one page of a batch has no room, all verdicts are False, and the others are there."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        verdicts = super()._store(space, hashes, contents)
        return [all(verdicts)] * len(verdicts)


@caught_by("KV-307")
class TakesOneForAll(DictStore):
    """Where one page of a batch had room, all verdicts are True."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        verdicts = super()._store(space, hashes, contents)
        return [any(verdicts)] * len(verdicts)


# --- a full disk -------------------------------------------------------------------------------------


@caught_by("KV-307")
class RaisesOsErrors(Shelf):
    """An error of the file system comes out as it is."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        temp = self._temp_path(path)
        self._write_file(temp, data)
        self._publish(temp, path)
        return True


@caught_by("KV-307")
class WritesWhatFits(Shelf):
    """A write that was cut short is not noticed: its set is True, and the page is missing its end."""

    def _write_file(self, path: Path, data: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


@caught_by("KV-307")
class ServesWhatFits(WritesWhatFits):
    """A page whose write was cut short is served, with zeros in place of its end."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash).exists()

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data.ljust(space.stored_nbytes, b"\0")


@caught_by("KV-307")
class WritesInPlace(Shelf):
    """A page is written where it belongs: what was refused is there, as far as there was room."""

    def _replaced(self, path: Path, data: bytes) -> bool:
        try:
            self._write_file(path, data)
        except OSError:
            return False
        return True

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash).exists()


@caught_by("KV-307", check="refused_pages_leave_no_debris")
class LeavesItsTrials(Shelf):
    """What it began to write when there was no room stays in the directory."""

    def _discard(self, temp: Path) -> None:
        pass


@caught_by("KV-307")
class StaysFull(Shelf):
    """When a write failed, it takes the disk for full until it is opened again."""

    _full = False

    def _replaced(self, path: Path, data: bytes) -> bool:
        self._full = self._full or not super()._replaced(path, data)
        return not self._full


@caught_by("KV-307")
class DeletesWhatItCannotReplace(Shelf):
    """It removes a page before it writes the new one: where there is no room, both are gone."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._removed(space, page_hash)
        return super()._write_whole(space, page_hash, data)


@caught_by("KV-307")
class WritesWhenItReads(Shelf):
    """It writes down when a page was read last, and does not read where it can't."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        self._write_file(self._folder(space) / "last-read.json", page_hash.encode())
        return super()._read(space, page_hash)


# --- no descriptors ----------------------------------------------------------------------------------


@caught_by("KV-307", check="without_free_descriptors_nothing_breaks")
class RaisesWithoutDescriptors(Shelf):
    """When the process has no descriptor left, a get is an OSError."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        try:
            return self._path(space, page_hash).read_bytes()
        except FileNotFoundError:
            return None


@caught_by("KV-307", check="without_free_descriptors_nothing_breaks")
class OpensWithoutCare(Shelf):
    """When the process has no descriptor left, from_config is an OSError."""

    def __init__(self, settings: ShelfSettings) -> None:
        os.close(os.open(Path(settings.path).parent, os.O_RDONLY))
        super().__init__(settings)


@caught_by("KV-307", check="without_free_descriptors_nothing_breaks")
class RemembersUnreadablePages(Shelf):
    """A page that could not be opened once is taken for damaged for ever."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._damaged: set[Path] = set()

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._path(space, page_hash)
        data = super()._read(space, page_hash)
        if data is None and path.exists():
            self._damaged.add(path)
        return None if path in self._damaged else data


@caught_by("KV-307", check="a_disk_without_room_refuses_the_page")
class RemembersAFullDisk(Shelf):
    """A key space that could not be made when the disk was full is never tried again."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._given_up: set[str] = set()

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._given_up:
            return False
        remembered = super()._remember(space)
        if not remembered:
            self._given_up.add(space.id)
        return remembered
