"""Memory of our own that pages pass through on their way to and from a store that is not bounded.

A call of such a store may touch its pages after its deadline. SGLang gives host pages to others as soon
as a call has returned, so such a store never gets SGLang's memory: an overdue call keeps a buffer of
ours.
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
_LEAST_NBYTES = 1 << 20
_STEPS_BITS = 4
"""Sizes are rounded up by an eighth at most: every page of a buffer is real memory."""
# Overdue calls may keep so many buffers, of 256 MiB and headers each; then nothing is begun.
_MOST_OVERDUE = 4


class Bounce:
    """Buffers of one direction, which are used again. Thread-safe."""

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._overdue = 0
        self._closed = False

    def take(self, nbytes: int) -> memoryview | None:
        """Return a buffer of at least `nbytes`, or None while too many are with overdue calls."""
        with self._lock:
            if self._overdue >= _MOST_OVERDUE:
                return None
            outgrown = self._free.pop() if self._free else None
        if outgrown is not None:
            if outgrown.nbytes >= nbytes:
                return outgrown
            self._unregister(outgrown)  # it goes: there are as many buffers as calls at once
            del outgrown
        unit = max(_LEAST_NBYTES, 1 << max(0, nbytes.bit_length() - _STEPS_BITS))
        buffer = map_memory(-(-nbytes // unit) * unit, "none")
        try:
            self._store.register_buffer(buffer)
        except Exception:
            logger.warning("the store will copy pages once more", exc_info=True)
        return buffer

    def give_back(self, buffer: memoryview, settled: Future[None]) -> None:
        """Use `buffer` again, once `settled` says that the store has let go of it."""
        if settled.done():
            self._free_again(buffer)
            return
        with self._lock:
            self._overdue += 1

        def let_go(_: Future[None]) -> None:
            with self._lock:
                self._overdue -= 1
            self._free_again(buffer)

        settled.add_done_callback(let_go)

    def close(self) -> None:
        """Unregister the buffers. Those of overdue calls stay as they are, for as long as these run."""
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

    def _free_again(self, buffer: memoryview) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(buffer)
                self._free.sort(key=len)  # the largest goes first, and few are ever outgrown


def nbytes_of(transfers: Sequence[Transfer]) -> int:
    """Return the size of a buffer that all pages of `transfers` fit into."""
    return sum(_stride(page) for transfer in transfers for page in transfer.pages)


def mirrored(transfers: Sequence[Transfer], buffer: memoryview) -> list[Transfer]:
    """Return the same transfers with headers and payloads in `buffer`."""
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


def copy_out(transfers: Sequence[Transfer], copies: Sequence[Transfer]) -> None:
    """Copy the payloads of `transfers` to `copies`."""
    for transfer, copy in zip(transfers, copies, strict=True):
        for page, mirror in zip(transfer.pages, copy.pages, strict=True):
            start, (target,) = 0, mirror.payload.segments
            for segment in page.payload.segments:
                target[start : start + segment.nbytes] = segment
                start += segment.nbytes


def copy_in(
    transfers: Sequence[Transfer], copies: Sequence[Transfer], whole: Sequence[bool]
) -> None:
    """Copy the payloads of `copies` back where every part of the page is whole."""
    for transfer, copy in zip(transfers, copies, strict=True):
        for page, mirror, there in zip(transfer.pages, copy.pages, whole, strict=True):
            if there:
                page.payload.copy_from(mirror.payload.segments[0])


def _stride(page: FramedPage) -> int:
    nbytes = len(page.header) + page.payload.nbytes
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
