"""Reusable memory for headers and for copies of pages. A store registers each buffer once."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.backend_support.byte_limit import ByteLimit
from hicache_storage.host_pool.memory import map_memory
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.page_store import PageStore

logger: logging.Logger = logging.getLogger(__name__)

_ALIGNMENT = 4096
_MIN_NBYTES = 1 << 20
# Round sizes up by at most an eighth, because every page of a buffer stays in memory.
_ROUNDING_BITS = 4
# Without a limit, this many overdue calls may keep a buffer, each of up to 256 MiB plus headers.
_MAX_OVERDUE = 4


def stride_nbytes(page_nbytes: int, frame_nbytes: int) -> int:
    """Return how many bytes of a buffer the copy of one page takes, with its header."""
    return -(-(frame_nbytes + page_nbytes) // _ALIGNMENT) * _ALIGNMENT


class Buffer:
    """Page-aligned memory that holds headers or framed pages. One call at a time uses it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view: memoryview = map_memory(nbytes, "none")
        self._headers: list[memoryview] = []
        self._frames: dict[int, list[FramedPage]] = {}

    def frames(self, page_nbytes: int, frame_nbytes: int, count: int) -> Sequence[FramedPage]:
        """Return `count` pages with headers, all in this buffer. Later calls return the same objects."""
        frames = self._frames.setdefault(page_nbytes, [])
        stride = stride_nbytes(page_nbytes, frame_nbytes)
        for start in range(len(frames) * stride, count * stride, stride):
            payload = start + frame_nbytes
            end = payload + page_nbytes
            page = Page.of_views((self.view[payload:end],), page_nbytes)
            frames.append(FramedPage(self.view[start:payload], page))
        return frames[:count]

    def headers(self, frame_nbytes: int, count: int) -> Sequence[memoryview]:
        """Return at least `count` headers for pages in other memory.

        All headers of a store have one size.
        """
        headers = self._headers
        starts = range(len(headers) * frame_nbytes, count * frame_nbytes, frame_nbytes)
        headers.extend(self.view[start : start + frame_nbytes] for start in starts)
        return headers


class Buffers:
    """Reusable buffers for loads or for saves. Thread-safe.

    With a limit, callers wait until their buffers fit. Without a limit, a buffer is as large as the
    largest call so far, and callers get no buffer while overdue calls hold four buffers.
    """

    def __init__(self, store: PageStore, limit_nbytes: int | None = None) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes: int = 0
        """The size of all buffers together."""
        self._store = store
        self._used = ByteLimit(limit_nbytes)
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._overdue = 0
        self._closed = False

    @property
    def used_nbytes(self) -> int:
        """The bytes of buffers that calls use, including overdue calls. 0 without a limit."""
        return self._used.nbytes

    def acquire(self, nbytes: int, timeout_s: float) -> Buffer | None:
        """Return a buffer of `nbytes`, or None if none is free in time.

        Without a limit, the buffer may be larger.
        """
        if self.limit_nbytes is None:
            unit = max(_MIN_NBYTES, 1 << max(0, nbytes.bit_length() - _ROUNDING_BITS))
            nbytes = -(-nbytes // unit) * unit
        elif not self._used.acquire(nbytes, timeout_s):
            return None
        with self._lock:
            if self.limit_nbytes is None and (self._closed or self._overdue >= _MAX_OVERDUE):
                return None
            # Prefer the buffer that was used last, because it may still be in the processor's cache.
            for number in reversed(range(len(self._free))):
                if self._suits(self._free[number], nbytes):
                    return self._free.pop(number)
            unneeded = self._make_room(nbytes)
        for buffer in unneeded:
            self._unregister(buffer)
        return self._map(nbytes)

    def release(self, buffer: Buffer, settled: Future[None] | None = None) -> None:
        """Reuse `buffer` as soon as `settled` is done, when the store does not access it any more."""
        if settled is not None and not settled.done():
            with self._lock:
                self._overdue += 1
            settled.add_done_callback(lambda _: self._end_overdue(buffer))
            return
        with self._lock:
            is_kept = not self._closed
            if is_kept:
                self._free.append(buffer)
        if self.limit_nbytes is not None:
            self._used.release(buffer.nbytes)
        if not is_kept:
            self._unregister(buffer)

    def close(self) -> None:
        """Unregister the free buffers. Those of overdue calls follow when the calls settle."""
        self._used.close()
        with self._lock:
            self._closed = True
            buffers, self._free = self._free, []
        for buffer in buffers:
            self._unregister(buffer)

    def _suits(self, buffer: Buffer, nbytes: int) -> bool:
        return buffer.nbytes == nbytes or (self.limit_nbytes is None and buffer.nbytes > nbytes)

    def _make_room(self, nbytes: int) -> list[Buffer]:
        """Count a new buffer in `nbytes`. Return the free buffers that it replaces.

        Without a limit it replaces at most one, so there are never more buffers than concurrent calls.
        """
        limit, unneeded = self.limit_nbytes, list[Buffer]()
        while self._free and (not unneeded if limit is None else self.nbytes + nbytes > limit):
            unneeded.append(self._free.pop(0))
            self.nbytes -= unneeded[-1].nbytes
        self.nbytes += nbytes
        return unneeded

    def _end_overdue(self, buffer: Buffer) -> None:
        with self._lock:
            self._overdue -= 1
        self.release(buffer)

    def _map(self, nbytes: int) -> Buffer:
        try:
            buffer = Buffer(nbytes)
        except BaseException:
            with self._lock:
                self.nbytes -= nbytes
            if self.limit_nbytes is not None:
                self._used.release(nbytes)
            raise
        try:
            self._store.register_buffer(buffer.view)
        except Exception:
            logger.warning(
                "the store cannot register a buffer, and will copy each page once more",
                exc_info=True,
            )
        return buffer

    def _unregister(self, buffer: Buffer) -> None:
        try:
            self._store.unregister_buffer(buffer.view)
        except Exception:
            logger.debug("a buffer was not registered", exc_info=True)
