"""Wrong stores: refused pages that show; KV-006."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace

_SOON_S = 0.1


@caught_by("KV-006")
class CountsAfterwards(DictStore):
    """A page is stored first; that it was too much is found then, and it is not taken back."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        key = self._key(space, page_hash)
        with self._lock:
            fits = self._make_room(key, len(data))
            self._put(key, Stored(space, page_hash, data))
        return fits


class _Refusing(DictStore):
    """A store whose subclass does something more with pages that it refuses."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        taken = super()._write_whole(space, page_hash, data)
        if not taken:
            self._refused(Stored(space, page_hash, data))
        return taken

    def _refused(self, stored: Stored) -> None:
        raise NotImplementedError


@caught_by("KV-006")
class TriesAgainLater(_Refusing):
    """A page that was refused waits in a queue, and is stored when a delete has made room."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._waiting: list[Stored] = []

    def _refused(self, stored: Stored) -> None:
        self._waiting.append(stored)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        removed = super()._removed(space, page_hash)
        waiting, self._waiting = self._waiting, []
        for stored in waiting:
            self._write_whole(*stored)
        return removed


@caught_by("KV-006")
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


@caught_by("KV-006")
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

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._unwritten: dict[tuple[KeySpace, str], bytes] = {}

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        written = super()._write_whole(space, page_hash, data)
        if not written:
            self._unwritten[space, page_hash] = data
        return written


@caught_by("KV-006")
class KeepsWhatFilesRefused(_Remembering):
    """A page whose file can't be written stays in a cache in memory, and its set returns False."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return super()._read(space, page_hash) or self._unwritten.get((space, page_hash))


@caught_by("KV-006")
class WritesUnwrittenFilesAtClose(_Remembering):
    """A page whose file can't be written is written when the store is closed, though refused."""

    def close(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        for (space, page_hash), data in unwritten.items():
            self._write_whole(space, page_hash, data)
        super().close()
