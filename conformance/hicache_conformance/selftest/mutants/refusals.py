"""Wrong stores: refused pages that show; KV-006."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.storage import StorageStats

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_storage.keys import KeySpace


_SOON_S = 0.1


class _Refusing(DictStore):
    """A store whose subclass does something more with pages that it refuses."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        taken = super()._write_whole(space, page_hash, data)
        if not taken:
            self._refused(Stored(space, page_hash, data))
        return taken

    def _refused(self, stored: Stored) -> None:
        raise NotImplementedError


@caught_by("KV-006:a_page_that_has_no_room_never_shows", says="batch_set returned False")
class GivesUpBeforeItsWriter(_Refusing):
    """A set gives up and returns False; the thread that writes does not know, and goes on."""

    def _refused(self, stored: Stored) -> None:
        timer = threading.Timer(_SOON_S, self._written, [stored])
        timer.daemon = True
        timer.start()

    def _written(self, stored: Stored) -> None:
        with self._lock:
            if not self._closed:
                self._put(self._key(stored.space, stored.page_hash), stored)


@caught_by("KV-006:bytes_that_have_no_room_never_show", says="version 1")
class RefusesWhatItReplaced(_Refusing):
    """A present page whose new bytes are refused, for want of room for both, has them all the same."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        old = self._pages.get(key)
        return super()._make_room(key, nbytes + (len(old.data) if old else 0))

    def _refused(self, stored: Stored) -> None:
        key = self._key(stored.space, stored.page_hash)
        with self._lock:
            if key in self._pages:
                self._put(key, stored)


class _Remembering(Shelf):
    """Remembers pages whose files could not be written, for a subclass."""

    _unwritten: dict[tuple[KeySpace, str], bytes] = own(dict)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        written = super()._write_whole(space, page_hash, data)
        if not written:
            self._unwritten[space, page_hash] = data
        return written


@caught_by("KV-006:a_page_that_the_file_system_refused_never_shows", says="shows once")
class KeepsWhatFilesRefused(_Remembering):
    """A page whose file can't be written stays in a cache in memory, and its set returns False."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return super()._read(space, page_hash) or self._unwritten.get((space, page_hash))


_EVERY = 5


class _Counting(DictStore):
    """Counts the pages that it is offered."""

    _offered = 0

    def _is_struck(self) -> bool:
        self._offered += 1
        return self._offered % _EVERY == 0


@caught_by("KV-009:an_empty_store_refuses_no_page")
class RefusesEveryFifth(_Counting):
    """Every fifth page is refused, for no reason."""

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        return not self._is_struck() and super()._make_room(key, nbytes)


@caught_by("KV-009:what_is_refused_is_counted")
class RefusesInSilence(DictStore):
    """A page that has no room is refused, and no counter says so."""

    def stats(self) -> StorageStats:
        stats = super().stats()
        return StorageStats(
            pages=stats.pages, nbytes=stats.nbytes, capacity_nbytes=stats.capacity_nbytes
        )
