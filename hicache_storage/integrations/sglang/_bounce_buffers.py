"""Bounce buffers: the adapter's own memory for transfers of a store that is not bounded.

A call of such a store may access its pages after the deadline. SGLang reuses host pages as soon as a
call has returned. A revocable store gets SGLang's pages until then, and headers in a bounce buffer. Any
other store gets whole pages in a bounce buffer. An overdue call keeps its buffer.
"""

from __future__ import annotations

import logging
import threading
from itertools import compress
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.host_pool.memory import map_memory
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.page import Revocable
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096
_MIN_NBYTES = 1 << 20
# Sizes are rounded up by an eighth at most, because every page of a buffer is resident.
_ROUNDING_BITS = 4
# A buffer may have 256 MiB and headers. While overdue calls keep this many, no further transfer starts.
_MAX_OVERDUE = 4


class BounceBuffer:
    """Page-aligned memory with the framed pages that were made in it. One transfer uses it at a time."""

    def __init__(self, nbytes: int) -> None:
        self.memory: memoryview = map_memory(nbytes, "none")
        self._sizes: tuple[tuple[int, int, int], ...] = ()
        self._pages: list[list[FramedPage]] = []
        self._headers: list[memoryview] = []

    def mirrors(self, transfers: Sequence[Transfer]) -> list[Transfer]:
        """Return the same transfers, with headers and payloads in this memory.

        The pages are made anew only where a transfer differs in its sizes from the one before.
        """
        sizes = tuple(map(_sizes, transfers))
        if sizes != self._sizes:
            self._pages = _frames_in(self.memory, sizes)
            self._sizes = sizes
        return [
            Transfer(transfer.space, transfer.hashes, pages)
            for transfer, pages in zip(transfers, self._pages, strict=True)
        ]

    def lent(self, transfers: Sequence[Transfer], revocable: Revocable) -> list[Transfer]:
        """Return the same transfers, with headers in this memory and payloads that have `revocable`."""
        headers = iter(self._headers_of(transfers))
        return [
            Transfer(
                transfer.space,
                transfer.hashes,
                [
                    FramedPage(
                        next(headers),
                        Page.of_views(page.payload.segments, page.payload.nbytes, revocable),
                    )
                    for page in transfer.pages
                ],
            )
            for transfer in transfers
        ]

    def _headers_of(self, transfers: Sequence[Transfer]) -> list[memoryview]:
        """Return a header for each page, or more. All pages of a store have headers of one size."""
        headers, size = self._headers, len(transfers[0].pages[0].header)
        count = sum(len(transfer.pages) for transfer in transfers)
        starts = range(len(headers) * size, count * size, size)
        headers.extend(self.memory[start : start + size] for start in starts)
        return headers


class BounceBuffers:
    """Reusable buffers of one direction, all of headers or all of whole pages. Thread-safe."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._free: list[BounceBuffer] = []
        self._overdue = 0
        self._closed = False

    def acquire(self, nbytes: int) -> BounceBuffer | None:
        """Return a buffer of at least `nbytes`, or None while overdue calls keep too many."""
        with self._lock:
            if self._overdue >= _MAX_OVERDUE:
                return None
            free = self._free.pop() if self._free else None
        if free is not None:
            if free.memory.nbytes >= nbytes:
                return free
            # A larger buffer replaces it, so there are never more buffers than concurrent calls.
            self._unregister(free)
            del free
        unit = max(_MIN_NBYTES, 1 << max(0, nbytes.bit_length() - _ROUNDING_BITS))
        buffer = BounceBuffer(-(-nbytes // unit) * unit)
        try:
            self._store.register_buffer(buffer.memory)
        except Exception:
            logger.warning("the store will copy pages once more", exc_info=True)
        return buffer

    def release(self, buffer: BounceBuffer, settled: Future[None]) -> None:
        """Reuse `buffer` once `settled` is done: the store does not access it any more."""
        if settled.done():
            self._recycle(buffer)
            return
        with self._lock:
            self._overdue += 1

        def end_overdue(_: Future[None]) -> None:
            with self._lock:
                self._overdue -= 1
            self._recycle(buffer)

        settled.add_done_callback(end_overdue)

    def close(self) -> None:
        """Unregister the free buffers. Overdue calls keep theirs until they end."""
        with self._lock:
            self._closed = True
            buffers, self._free = self._free, []
        for buffer in buffers:
            self._unregister(buffer)

    def _unregister(self, buffer: BounceBuffer) -> None:
        try:
            self._store.unregister_buffer(buffer.memory)
        except Exception:
            logger.debug("a buffer was not registered", exc_info=True)

    def _recycle(self, buffer: BounceBuffer) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(buffer)
                self._free.sort(
                    key=lambda one: one.memory.nbytes
                )  # the largest buffer is used first


def buffer_nbytes(transfers: Sequence[Transfer]) -> int:
    """Return the size of a buffer for all pages of `transfers`."""
    return sum(
        count * _stride(header, payload) for count, header, payload in map(_sizes, transfers)
    )


def headers_nbytes(transfers: Sequence[Transfer]) -> int:
    """Return the size of a buffer for the headers of `transfers`."""
    return sum(count * header for count, header, _ in map(_sizes, transfers))


def copy_to_mirrors(
    transfers: Sequence[Transfer], copies: Sequence[Transfer], *, checksum: bool
) -> None:
    """Copy the payloads of `transfers` to `copies`. With `checksum`, hash them on the way."""
    digests = native.copy_pages(_payloads(copies), _payloads(transfers), 0 if checksum else -1)
    mirrors = (page.payload for copy in copies for page in copy.pages)
    for mirror, digest in zip(mirrors, digests, strict=False):
        mirror.digest = digest


def copy_from_mirrors(
    transfers: Sequence[Transfer], copies: Sequence[Transfer], complete: list[bool]
) -> None:
    """Copy the payloads of `copies` back for each page that is complete in all its parts."""
    wanted = complete * len(transfers)
    native.copy_pages(
        list(compress(_payloads(transfers), wanted)), list(compress(_payloads(copies), wanted)), -1
    )


def _payloads(transfers: Sequence[Transfer]) -> list[tuple[memoryview, ...]]:
    return [page.payload.segments for transfer in transfers for page in transfer.pages]


def _sizes(transfer: Transfer) -> tuple[int, int, int]:
    """Return the number of pages and the bytes of header and payload, which all pages share."""
    first = transfer.pages[0]
    return len(transfer.pages), len(first.header), first.payload.nbytes


def _frames_in(memory: memoryview, sizes: Sequence[tuple[int, int, int]]) -> list[list[FramedPage]]:
    """Return framed pages that follow each other in `memory`, for each entry of `sizes`."""
    start = 0
    frames: list[list[FramedPage]] = []
    for count, header, payload in sizes:
        pages: list[FramedPage] = []
        for _ in range(count):
            middle, end = start + header, start + header + payload
            page = Page.of_views((memory[middle:end],), payload)
            pages.append(FramedPage(memory[start:middle], page))
            start += _stride(header, payload)
        frames.append(pages)
    return frames


def _stride(header_nbytes: int, payload_nbytes: int) -> int:
    return -(-(header_nbytes + payload_nbytes) // _ALIGNMENT) * _ALIGNMENT
