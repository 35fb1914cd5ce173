"""Memory of the runner, for headers and for copies of pages."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.host_pool.memory import map_memory
from hicache_storage.page import Page
from hicache_storage.page_store.frame import FramedPage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_ALIGNMENT = 4096


def stride_nbytes(page_nbytes: int, frame_nbytes: int) -> int:
    """Return the bytes of private memory that one page takes, with its header."""
    return -(-(frame_nbytes + page_nbytes) // _ALIGNMENT) * _ALIGNMENT


class PrivateBuffer:
    """Page-aligned memory with the framed pages that were made in it. One piece of a job uses it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = map_memory(nbytes, "none")
        self._headers: list[memoryview] = []
        self._frames: dict[int, list[FramedPage]] = {}

    def frames(self, page_nbytes: int, frame_nbytes: int, count: int) -> Sequence[FramedPage]:
        """Return `count` pages with headers, all of them in this buffer."""
        frames = self._frames.setdefault(page_nbytes, [])
        stride = stride_nbytes(page_nbytes, frame_nbytes)
        for start in range(len(frames) * stride, count * stride, stride):
            payload = start + frame_nbytes
            end = payload + page_nbytes
            page = Page.of_views((self.view[payload:end],), page_nbytes)
            frames.append(FramedPage(self.view[start:payload], page))
        return frames[:count]

    def frames_of(self, pages: Sequence[Page], frame_nbytes: int) -> Sequence[FramedPage]:
        """Return `pages`, which are in other memory, with headers in this buffer."""
        headers = self._headers
        ends = range(
            (len(headers) + 1) * frame_nbytes, (len(pages) + 1) * frame_nbytes, frame_nbytes
        )
        headers.extend(self.view[end - frame_nbytes : end] for end in ends)
        return [FramedPage(header, page) for header, page in zip(headers, pages, strict=False)]


class PrivateMemory:
    """Reusable buffers of one direction, of `limit_nbytes` together at most. Thread-safe.

    Each buffer is registered with the store once. An overdue call keeps its buffer until it settles.
    """

    def __init__(self, store: PageStore, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self._store = store
        self._changed = threading.Condition()
        self._free: list[PrivateBuffer] = []
        self._nbytes = self._used_nbytes = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return self._nbytes

    @property
    def used_nbytes(self) -> int:
        """The bytes of the buffers that calls use, overdue ones included."""
        return self._used_nbytes

    def acquire(self, nbytes: int, deadline: Deadline) -> PrivateBuffer | None:
        """Return a buffer of `nbytes`. Return None if none is free by the deadline."""
        with self._changed:
            fits = self._changed.wait_for(
                lambda: self._closed or self._used_nbytes + nbytes <= self.limit_nbytes,
                deadline.remaining_s(),
            )
            if self._closed or not fits:
                return None
            self._used_nbytes += nbytes
            # The buffer that was used last may still be in the processor's cache.
            for number in reversed(range(len(self._free))):
                if self._free[number].nbytes == nbytes:
                    return self._free.pop(number)
            unneeded = self._make_room(nbytes)
        for buffer in unneeded:
            self._unregister(buffer)
        return self._map(nbytes)

    def release(self, buffer: PrivateBuffer, settled: Future[None] | None = None) -> None:
        """Reuse `buffer` once `settled` is done: the store does not access it any more."""
        if settled is not None and not settled.done():
            settled.add_done_callback(lambda _: self.release(buffer))
            return
        with self._changed:
            self._used_nbytes -= buffer.nbytes
            is_kept = not self._closed
            if is_kept:
                self._free.append(buffer)
            self._changed.notify_all()
        if not is_kept:
            self._unregister(buffer)

    def close(self) -> None:
        """Unregister the free buffers. Buffers of overdue calls follow when these calls settle."""
        with self._changed:
            self._closed = True
            buffers, self._free = self._free, []
            self._changed.notify_all()
        for buffer in buffers:
            self._unregister(buffer)

    def _make_room(self, nbytes: int) -> list[PrivateBuffer]:
        """Count a new buffer. Return the free ones of other sizes that must go for it."""
        unneeded: list[PrivateBuffer] = []
        while self._free and self._nbytes + nbytes > self.limit_nbytes:
            unneeded.append(self._free.pop(0))
            self._nbytes -= unneeded[-1].nbytes
        self._nbytes += nbytes
        return unneeded

    def _map(self, nbytes: int) -> PrivateBuffer:
        try:
            buffer = PrivateBuffer(nbytes)
        except BaseException:
            with self._changed:
                self._nbytes -= nbytes
                self._used_nbytes -= nbytes
                self._changed.notify_all()
            raise
        try:
            self._store.register_buffer(buffer.view)
        except Exception:
            logger.warning("the store will copy pages once more", exc_info=True)
        return buffer

    def _unregister(self, buffer: PrivateBuffer) -> None:
        try:
            self._store.unregister_buffer(buffer.view)
        except Exception:
            logger.debug("a buffer was not registered", exc_info=True)
