"""Wrong stores: pages that are there and should not be, and the other way round; KV-001 to KV-005."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_conformance.selftest.references.file_a_page import ShelfSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_SOON_S = 0.005

# --- KV-001 --------------------------------------------------------------------------------------


@caught_by("KV-001")
class AskingMakesPages(DictStore):
    """A get of a missing page leaves a page of zeros in its place (a defaultdict)."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        for page_hash, data in zip(hashes, found, strict=True):
            if data is None:
                self._write_whole(space, page_hash, bytes(space.stored_nbytes))
        return found


@caught_by("KV-001")
class HashesOfAllSpaces(DictStore):
    """Exists knows which hashes were set, and not in which key space."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        if super()._has(space, page_hash):
            return True
        with self._lock:
            return any(stored.page_hash == page_hash for stored in self._pages.values())


@caught_by("KV-001")
class DeletingListsPages(DictStore):
    """A delete of a page that was never there leaves an entry, which exists takes for a page."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._entries: set[Hashable] = set()

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._key(space, page_hash) in self._entries or super()._has(space, page_hash)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if not super()._has(space, page_hash):
            self._entries.add(self._key(space, page_hash))
        return super()._removed(space, page_hash)


# --- KV-002 --------------------------------------------------------------------------------------


@caught_by("KV-002")
class LosesTheLastPage(DictStore):
    """The last page of a batch is not stored, and its verdict is True."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        kept = len(hashes) if len(hashes) == 1 else len(hashes) - 1
        stored = super()._store(space, hashes[:kept], contents[:kept])
        return stored + [True] * (len(hashes) - kept)


@caught_by("KV-002")
class RemembersAThousand(DictStore):
    """The index has room for 1,000 pages; older ones go without a word."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        if len(self._pages) > 1000:
            self._drop(next(iter(self._pages)))


class _RemembersMisses(DictStore):
    """Has a list of pages that were not found, which set does not change."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._absent: set[Hashable] = set()

    def _is_known_absent(self, space: KeySpace, page_hash: str, found: object) -> bool:
        key = self._key(space, page_hash)
        if not found:
            self._absent.add(key)
        return key in self._absent


@caught_by("KV-002")
class RemembersMisses(_RemembersMisses):
    """What exists has once not found, it does not look for again: set does not tell it."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return not self._is_known_absent(space, page_hash, super()._has(space, page_hash))


@caught_by("KV-002")
class ReadsMissesOnce(_RemembersMisses):
    """What get has once not found, it does not look for again: set does not tell it."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        return [
            None if self._is_known_absent(space, page_hash, data) else data
            for page_hash, data in zip(hashes, super()._contents(space, hashes), strict=True)
        ]


@caught_by("KV-002")
class OpeningEmpties(DictStore):
    """Opening a key space makes it anew, and loses the pages that it had."""

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        for info in self._names(space):
            self._removed(space, info.page_hash)


@caught_by("KV-002")
class KeySpacesByIdentity(DictStore):
    """Pages are kept under the object that is the key space, not under what it says."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._objects: list[KeySpace] = []

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        if not any(one is space for one in self._objects):
            self._objects.append(space)
        return id(space), page_hash


@caught_by("KV-002")
class Sha256Only(DictStore):
    """Page hashes are taken to have 64 digits; others are refused."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return len(page_hash) == 64 and super()._write_whole(space, page_hash, data)


@caught_by("KV-002")
class NeedsWritableMemory(DictStore):
    """The address of a page to store is found in a way that needs memory which can be written to."""

    def _taken(self, page: Page) -> bytes:
        views = [(ctypes.c_char * part.nbytes).from_buffer(part) for part in page.segments]
        return b"".join(view.raw for view in views)


@caught_by("KV-002")
class NotFoundIsTheLast(DictStore):
    """Deleting an absent page removes the page that was set last (`find` gives -1)."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        key = self._key(space, page_hash)
        with self._lock:
            absent = key not in self._pages
            newest = next(reversed(self._pages), None)
            if absent and newest is not None and self._pages[newest].space == space:
                self._drop(newest)
        return super()._removed(space, page_hash)


@caught_by("KV-002")
class ReadsBehindItsWrites(DictStore):
    """A set is True when the page is in the queue, where reads do not look."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        timer = threading.Timer(_SOON_S, self._written, [space, page_hash, data])
        timer.daemon = True
        timer.start()
        return True

    def _written(self, space: KeySpace, page_hash: str, data: bytes) -> None:
        with suppress(StorageClosed):
            super()._write_whole(space, page_hash, data)


@caught_by("KV-002", "KV-401")
class LosesItsTail(Shelf):
    """Pages are written four at a time; close does not write the rest."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._pending: dict[tuple[KeySpace, str], bytes] = {}
        self._pending_lock = threading.Lock()

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return (space, page_hash) in self._pending or super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return self._pending.get((space, page_hash)) or super()._read(space, page_hash)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        with self._pending_lock:
            self._pending[space, page_hash] = data
            if len(self._pending) == 4:
                for (where, which), pending in self._pending.items():
                    super()._write_whole(where, which, pending)
                self._pending = {}
        return True

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        with self._pending_lock:
            self._pending.pop((space, page_hash), None)
        return super()._removed(space, page_hash)


# --- KV-004 --------------------------------------------------------------------------------------


@caught_by("KV-004")
class BloomFilter(DictStore):
    """Exists asks a filter that is right about what is there, and sometimes wrong about the rest."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            names = [stored.page_hash for stored in self._pages.values() if stored.space == space]
        return any(name[:2] == page_hash[:2] for name in names)


@caught_by("KV-004")
class MissIsAKeyError(DictStore):
    """A get of a page that is not there raises KeyError."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        return [self._pages[self._key(space, page_hash)].data for page_hash in hashes]


@caught_by("KV-004")
class MissIsAMissingFile(Shelf):
    """Exists of a page that is not there raises FileNotFoundError."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash).stat().st_size == space.stored_nbytes


@caught_by("KV-004")
class StumblesOverTombstones(DictStore):
    """A deleted page is marked as None, and the next get takes the length of it."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._tombstones: set[Hashable] = set()

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._tombstones.discard(key)
        super()._put(key, stored)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        if super()._has(space, page_hash):
            self._tombstones.add(self._key(space, page_hash))
        return super()._removed(space, page_hash)

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        if self._tombstones.intersection(self._key(space, page_hash) for page_hash in hashes):
            raise TypeError("object of type 'NoneType' has no len()")
        return super()._contents(space, hashes)


@caught_by("KV-004")
class WritesWholeBlocks(DictStore):
    """A hit is written in blocks of 16 bytes: the last of them goes beyond the page."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        filled = super()._filled(page, data)
        if filled:
            address, nbytes = page.addresses[-1]
            ctypes.memset(address + nbytes, 0, -nbytes % 16)
        return filled


# --- KV-005 --------------------------------------------------------------------------------------


@caught_by("KV-005")
class RefusesPresentPages(DictStore):
    """A set of a page that is there returns False: nothing was stored."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return not super()._has(space, page_hash) and super()._write_whole(space, page_hash, data)


@caught_by("KV-005")
class MakesFilesOnly(Shelf):
    """A set of a page that is there raises FileExistsError (mode "x")."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if self._path(space, page_hash).exists():
            raise FileExistsError(17, "File exists", page_hash)
        return super()._write_whole(space, page_hash, data)


@caught_by("KV-005")
class AppendsToPages(Shelf):
    """A set of a page that is there is appended to its file (mode "ab")."""

    def _publish(self, temp: Path, path: Path) -> None:
        if path.exists():
            temp.write_bytes(path.read_bytes() + temp.read_bytes())
        super()._publish(temp, path)


@caught_by("KV-005")
class PatchesTheFirstBlock(DictStore):
    """Of a page that is there only the first 512 bytes are replaced."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        old = self._pages.get(key)
        if old is not None:
            stored = Stored(stored.space, stored.page_hash, stored.data[:512] + old.data[512:])
        super()._put(key, stored)


@caught_by("KV-005")
class SecondSetRemoves(DictStore):
    """A page that is there is removed to make room for the new one, which is then not written."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        if key in self._pages:
            self._drop(key)
        else:
            super()._put(key, stored)


@caught_by("KV-005")
class LeavesOthersPagesAlone(Shelf):
    """A set of a page that another handle has set returns False: it is not this one's."""

    def __init__(self, settings: ShelfSettings) -> None:
        super().__init__(settings)
        self._own: set[tuple[KeySpace, str]] = set()

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if (space, page_hash) not in self._own and super()._has(space, page_hash):
            return False
        self._own.add((space, page_hash))
        return super()._write_whole(space, page_hash, data)
