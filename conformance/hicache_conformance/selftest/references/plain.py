"""The base of all reference stores: it implements the interface with a few small methods.

A wrong store overrides one of these methods, listed from the outside in:

    _begin          runs before every call, and refuses wrong ones
    _answer         returns the verdicts, after every call
    _taken, _filled copy a page out of, and into, the caller's memory
    _present, _contents, _store, _remove    a batch, page by page or in one round trip
    _has, _read, _write_whole, _removed     one page
    _key            the key of a page
    _is_whole       tests the length of the bytes of a page
    _remember, _known_spaces, _names        key spaces and listings
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Annotated

from hicache_storage.backend_support.counters import Counters
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.settings import Field
from hicache_storage.storage import HiCacheStorage, PageInfo, StorageStats

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

FileName = Annotated[
    str, Field(min_length=1, pattern=r"^[^\x00]+$", description="text without NUL")
]
"""The type of a path in a config."""


_CHUNK_NBYTES = 64 << 10


class PlainStore(HiCacheStorage):
    """An obviously right store. It copies bytes at once, and keeps no memory of the caller.

    Hold no lock in `_taken` and `_filled`, so that a page that is slow to copy stalls only its own
    call.
    """

    def __init__(self) -> None:
        self._counters = Counters()

    # --- the interface -----------------------------------------------------------------------------

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._remember(space)  # if the manifest had no room, the next set tries again

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._begin(space, hashes)
        return self._answer(self._present(space, hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        found = self._contents(space, hashes)
        return self._answer([self._filled(*pair) for pair in zip(pages, found, strict=True)])

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        contents = [self._taken(page) for page in pages]
        self.ensure_open()  # close may have run while the pages were copied
        return self._answer(self._store(space, hashes, contents))

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._begin(space, hashes)
        return self._answer(self._remove(space, hashes))

    def spaces(self) -> Iterator[KeySpace]:
        if not self.capabilities.enumerable:
            return super().spaces()
        self.ensure_open()
        return iter(self._known_spaces())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        if not self.capabilities.enumerable:
            return super().scan(space)
        self.ensure_open()
        return iter([info for info in self._names(space) if info.nbytes == space.stored_nbytes])

    def clear(self, space: KeySpace) -> int:
        removed = super().clear(space)
        for info in self._names(space):
            if info.nbytes != space.stored_nbytes:  # a damaged page does not count, but takes room
                self._removed(space, info.page_hash)
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    # --- a call --------------------------------------------------------------------------------------

    def _begin(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page] | None = None
    ) -> None:
        """Raise if the store is closed, or the call exceeds the limits that the store declares."""
        super().open_space(space)
        limit = self.capabilities.max_batch
        if limit is not None and len(hashes) > limit:
            raise UnsupportedOperation(
                f"{type(self).__name__} takes batches of up to {limit} pages, not {len(hashes)}:"
                " split the batch"
            )
        most = self.capabilities.max_batch_nbytes
        nbytes = len(pages or ()) * space.stored_nbytes
        if most is not None and nbytes > max(most, space.stored_nbytes):
            raise UnsupportedOperation(
                f"{type(self).__name__} takes batches of up to {most} bytes, or one page: split the"
                " batch"
            )
        if pages is not None and len(pages) != len(hashes):
            raise ValueError(f"{len(hashes)} hashes need as many pages, not {len(pages)}")

    def _answer(self, verdicts: list[bool]) -> list[bool]:
        """Return the verdicts of a call, in the order of its hashes."""
        return verdicts

    def _taken(self, page: Page) -> bytes:
        """Return a copy of a page to store. It has no bytes if the page was revoked."""
        if page.revocable is None:
            return page.tobytes()
        copied = bytearray(page.nbytes)
        return bytes(copied if _copy_in_accesses(page, memoryview(copied), fills=False) else b"")

    def _filled(self, page: Page, data: bytes | None) -> bool:
        """Copy `data` into `page` and return True. Return False for None, which is a miss."""
        if data is None or len(data) != page.nbytes:
            return False
        if page.revocable is not None:
            return _copy_in_accesses(page, memoryview(bytearray(data)), fills=True)
        page.copy_from(data)
        return True

    # --- a batch -------------------------------------------------------------------------------------

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [self._has(space, page_hash) for page_hash in hashes]

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of whole pages, and None for the others."""
        found = [self._read(space, page_hash) for page_hash in hashes]
        return [data if self._is_whole(space, data) else None for data in found]

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return [
            self._is_whole(space, data) and self._write_whole(space, page_hash, data)
            for page_hash, data in zip(hashes, contents, strict=True)
        ]

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [self._removed(space, page_hash) for page_hash in hashes]

    # --- one page ------------------------------------------------------------------------------------

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        """Return the key of a page, for stores with keys instead of paths."""
        return space.id, page_hash

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        """Return True if `data` exists and is as long as the pages of `space`."""
        return data is not None and len(data) == space.stored_nbytes

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._is_whole(space, self._read(space, page_hash))

    @abc.abstractmethod
    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        """Return the stored bytes of a page, of any length, or None."""

    @abc.abstractmethod
    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        """Make `data` the page in one step. Return False if it has no room; then nothing has changed."""

    @abc.abstractmethod
    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        """Remove a page. Return True once it is gone."""

    # --- listings --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _remember(self, space: KeySpace) -> bool:
        """Store the manifest of `space` for `_known_spaces`. Return False if it has no room."""

    @abc.abstractmethod
    def _known_spaces(self) -> list[KeySpace]:
        """Return the key spaces whose manifests are stored."""

    @abc.abstractmethod
    def _names(self, space: KeySpace) -> list[PageInfo]:
        """Return the pages of `space` with their stored sizes, damaged ones included."""


def _copy_in_accesses(page: Page, copy: memoryview, *, fills: bool) -> bool:
    """Copy a revocable page, or fill it, chunk by chunk. Return False once it is revoked."""
    assert page.revocable is not None
    start = 0
    for segment in page.segments:
        for offset in range(0, segment.nbytes, _CHUNK_NBYTES):
            chunk = segment[offset : offset + _CHUNK_NBYTES]
            end = start + chunk.nbytes
            if not page.revocable.enter():
                return False
            try:
                if fills:
                    chunk[:] = copy[start:end]
                else:
                    copy[start:end] = chunk
            finally:
                page.revocable.leave()
            start = end
    return True
