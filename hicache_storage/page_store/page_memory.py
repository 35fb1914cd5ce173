"""Memory of our own for storage calls: headers, and copies of pages that a storage must not touch."""

from __future__ import annotations

import logging
import mmap
import threading
from typing import TYPE_CHECKING

from hicache_storage.page_store.frame import FramedPage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_ALIGNMENT = 4096
_MIN_NBYTES = 1 << 16
# Round sizes up by at most an eighth, because every page of a buffer stays in memory.
_ROUNDING_BITS = 4


def stride_nbytes(page_nbytes: int, frame_nbytes: int) -> int:
    """Return how many bytes of a buffer the copy of one page takes, with its header."""
    return -(-(frame_nbytes + page_nbytes) // _ALIGNMENT) * _ALIGNMENT


class Buffer:
    """Page-aligned memory that holds headers or framed pages. One storage call at a time uses it."""

    def __init__(self, nbytes: int) -> None:
        self.view: memoryview = memoryview(mmap.mmap(-1, nbytes, flags=_PRIVATE))[:nbytes]
        self._headers: list[memoryview] = []
        self._frames: dict[int, list[FramedPage]] = {}

    def frames(self, page_nbytes: int, frame_nbytes: int, count: int) -> list[FramedPage]:
        """Return `count` pages with headers, each in one piece. Later calls return the same objects."""
        frames = self._frames.setdefault(page_nbytes, [])
        stride = stride_nbytes(page_nbytes, frame_nbytes)
        for start in range(len(frames) * stride, count * stride, stride):
            frames.append(FramedPage.of_memory(self.view[start:], frame_nbytes, page_nbytes))
        return frames[:count]

    def headers(self, frame_nbytes: int, count: int) -> Sequence[memoryview]:
        """Return at least `count` headers for pages in other memory.

        All headers of a store have one size.
        """
        headers = self._headers
        starts = range(len(headers) * frame_nbytes, count * frame_nbytes, frame_nbytes)
        headers.extend(self.view[start : start + frame_nbytes] for start in starts)
        return headers


class PageMemory:
    """The reusable buffers of one lane. A storage registers each of them once. Thread-safe.

    A storage call takes a buffer when it begins, and gives it back when it ends, however late. So there
    are never more buffers than threads.
    """

    def __init__(self, storage: HiCacheStorage, limit_nbytes: int) -> None:
        self.nbytes: int = 0
        """The size of all buffers together."""
        self.used_nbytes: int = 0
        """The size of the buffers that storage calls use now, late ones included."""
        self._storage = storage
        self._limit_nbytes = limit_nbytes
        self._changed = threading.Condition()
        self._free: list[Buffer] = []
        self._closed = False

    def take(self, nbytes: int, timeout_s: float) -> Buffer | None:
        """Return a buffer of `nbytes` or more, or None if the limit leaves no room in time.

        If no buffer is in use, a call may take even more than the limit.
        """
        unit = max(_MIN_NBYTES, 1 << max(0, nbytes.bit_length() - _ROUNDING_BITS))
        nbytes = -(-nbytes // unit) * unit
        with self._changed:
            fits = self._changed.wait_for(lambda: self._closed or self._fits(nbytes), timeout_s)
            if self._closed or not fits:
                return None
            # Prefer the buffer that was used last, because it may still be in the processor's cache.
            suiting = (one for one in reversed(self._free) if one.view.nbytes >= nbytes)
            buffer, unneeded = next(suiting, None), list[Buffer]()
            if buffer is not None:
                self._free.remove(buffer)
                self.used_nbytes += buffer.view.nbytes
            else:
                unneeded = self._make_room(nbytes)
        for one in unneeded:
            self._unregister(one)
        return buffer or self._map(nbytes)

    def give_back(self, buffer: Buffer) -> None:
        """Keep `buffer` for another storage call."""
        with self._changed:
            is_kept = not self._closed
            if is_kept:
                self._free.append(buffer)
            else:
                self.nbytes -= buffer.view.nbytes
            self.used_nbytes -= buffer.view.nbytes
            self._changed.notify()
        if not is_kept:
            self._unregister(buffer)

    def close(self) -> None:
        """Unregister the free buffers. Those in use follow when their calls end."""
        with self._changed:
            self._closed = True
            buffers, self._free = self._free, []
            self.nbytes = self.used_nbytes
            self._changed.notify_all()
        for buffer in buffers:
            self._unregister(buffer)

    def _fits(self, nbytes: int) -> bool:
        return (
            not self.used_nbytes
            or self.used_nbytes + nbytes <= self._limit_nbytes
            or any(buffer.view.nbytes >= nbytes for buffer in self._free)
        )

    def _make_room(self, nbytes: int) -> list[Buffer]:
        """Count a new buffer. Return the free buffers that it replaces: one, or more for the limit."""
        unneeded: list[Buffer] = []
        while self._free and (not unneeded or self.nbytes + nbytes > self._limit_nbytes):
            unneeded.append(self._free.pop(0))
            self.nbytes -= unneeded[-1].view.nbytes
        self.nbytes += nbytes
        self.used_nbytes += nbytes
        return unneeded

    def _map(self, nbytes: int) -> Buffer:
        try:
            buffer = Buffer(nbytes)
        except BaseException:
            with self._changed:
                self.nbytes -= nbytes
                self.used_nbytes -= nbytes
                self._changed.notify()
            raise
        try:
            self._storage.register_buffer(buffer.view)
        except Exception:
            logger.warning(
                "the store cannot register a buffer, and will copy each page once more",
                exc_info=True,
            )
        return buffer

    def _unregister(self, buffer: Buffer) -> None:
        try:
            self._storage.unregister_buffer(buffer.view)
        except Exception:
            logger.debug("a buffer was not registered", exc_info=True)
