"""Bounce buffers: the adapter's own memory for transfers of a store that is not bounded.

A call of such a store may access its pages after the deadline. SGLang reuses host pages as soon as a
call has returned, so such a store never gets SGLang's memory. An overdue call keeps a bounce buffer
instead.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.host_pool.memory import map_memory
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096
_MIN_NBYTES = 1 << 20
# Sizes are rounded up by an eighth at most, because every page of a buffer is resident.
_ROUNDING_BITS = 4
# A buffer may have 256 MiB and headers. While overdue calls keep this many, no further transfer starts.
_MAX_OVERDUE = 4


class BounceBuffers:
    """Reusable buffers of one direction. Thread-safe."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._overdue = 0
        self._closed = False

    def acquire(self, nbytes: int) -> memoryview | None:
        """Return a buffer of at least `nbytes`, or None while overdue calls keep too many."""
        with self._lock:
            if self._overdue >= _MAX_OVERDUE:
                return None
            free = self._free.pop() if self._free else None
        if free is not None:
            if free.nbytes >= nbytes:
                return free
            # A larger buffer replaces it, so there are never more buffers than concurrent calls.
            self._unregister(free)
            del free
        unit = max(_MIN_NBYTES, 1 << max(0, nbytes.bit_length() - _ROUNDING_BITS))
        buffer = map_memory(-(-nbytes // unit) * unit, "none")
        try:
            self._store.register_buffer(buffer)
        except Exception:
            logger.warning("the store will copy pages once more", exc_info=True)
        return buffer

    def release(self, buffer: memoryview, settled: Future[None]) -> None:
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

    def _unregister(self, buffer: memoryview) -> None:
        try:
            self._store.unregister_buffer(buffer)
        except Exception:
            logger.debug("a buffer was not registered", exc_info=True)

    def _recycle(self, buffer: memoryview) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(buffer)
                self._free.sort(key=len)  # the largest buffer is used first


def buffer_nbytes(transfers: Sequence[Transfer]) -> int:
    """Return the size of a buffer for all pages of `transfers`."""
    return sum(_stride(page) for transfer in transfers for page in transfer.pages)


def mirror_transfers(transfers: Sequence[Transfer], buffer: memoryview) -> list[Transfer]:
    """Return the same transfers, with headers and payloads in `buffer`."""
    start = 0
    copies: list[Transfer] = []
    for transfer in transfers:
        pages: list[FramedPage] = []
        for page in transfer.pages:
            payload = start + len(page.header)
            end = payload + page.payload.nbytes
            pages.append(
                FramedPage(
                    buffer[start:payload], Page.of_views((buffer[payload:end],), end - payload)
                )
            )
            start += _stride(page)
        copies.append(Transfer(transfer.space, transfer.hashes, pages))
    return copies


def copy_to_mirrors(transfers: Sequence[Transfer], copies: Sequence[Transfer]) -> None:
    """Copy the payloads of `transfers` to `copies`."""
    for transfer, copy in zip(transfers, copies, strict=True):
        for page, mirror in zip(transfer.pages, copy.pages, strict=True):
            page.payload.copy_to(mirror.payload.segments[0])


def copy_from_mirrors(
    transfers: Sequence[Transfer], copies: Sequence[Transfer], complete: Sequence[bool]
) -> None:
    """Copy the payloads of `copies` back for each page that is complete in all its parts."""
    for transfer, copy in zip(transfers, copies, strict=True):
        for page, mirror, is_complete in zip(transfer.pages, copy.pages, complete, strict=True):
            if is_complete:
                page.payload.copy_from(mirror.payload.segments[0])


def _stride(page: FramedPage) -> int:
    nbytes = len(page.header) + page.payload.nbytes
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
