"""Buffers for copies of pages. A call borrows one, and the next call reuses it."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hicache_storage.errors import HiCacheError
from hicache_storage.page import Page, address_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger(__name__)

_LARGEST_KEPT_NBYTES = 64 << 20
"""The largest buffer that is kept for another call: twice the page store's largest call."""
_LEAST_NBYTES = 1 << 20
_LEAST_ALIGNMENT = 64


class Buffer(NamedTuple):
    """Aligned memory."""

    memory: memoryview
    is_registered: bool

    def pages(self, count: int, nbytes: int, stride: int) -> list[Page]:
        """Return `count` pages of `nbytes`, which begin every `stride` bytes."""
        return [
            Page.of_views((self.memory[start : start + nbytes],), nbytes)
            for start in range(0, stride * count, stride)
        ]


class PageBuffers:
    """Reusable buffers for copies of pages, registered with the storage that reads or stores them.

    Thread-safe, without a lock that a fork could leave held.
    """

    def __init__(self, storage: HiCacheStorage, *, most_kept: int) -> None:
        self._storage = storage
        self._alignment = max(_LEAST_ALIGNMENT, storage.capabilities.alignment)
        self._idle: deque[Buffer] = deque()
        self._most_kept = most_kept
        self._closed = False

    @contextmanager
    def lend(self, count: int, nbytes: int) -> Generator[list[Page], None, None]:
        """Lend `count` aligned pages of `nbytes` bytes each.

        The pages still contain bytes of earlier calls.
        """
        buffer = self.take(count, nbytes)
        try:
            yield buffer.pages(count, nbytes, self.stride_nbytes(nbytes))
        finally:
            self.put_back(buffer)

    def stride_nbytes(self, nbytes: int) -> int:
        """Return how many bytes a page of `nbytes` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def take(self, count: int, nbytes: int) -> Buffer:
        """Return a buffer for `count` pages of `nbytes` bytes. Put it back when nothing uses it."""
        needed = self.stride_nbytes(nbytes) * count
        try:
            buffer = self._idle.pop()
        except IndexError:
            return self._make(needed)
        if buffer.memory.nbytes >= needed:
            return buffer
        self._release(buffer)
        return self._make(needed)

    def put_back(self, buffer: Buffer) -> None:
        """Keep a buffer for another call, or release it."""
        is_large = buffer.memory.nbytes > _LARGEST_KEPT_NBYTES
        if self._closed or is_large or len(self._idle) >= self._most_kept:
            self._release(buffer)
        else:
            self._idle.append(buffer)

    def close(self) -> None:
        """Release the idle buffers. Each running call releases its own buffer when it ends."""
        self._closed = True
        while self._idle:
            self._release(self._idle.pop())

    def _make(self, nbytes: int) -> Buffer:
        """Return a new buffer.

        Its size is a power of two, so that later calls seldom need a larger buffer.
        """
        size = max(_LEAST_NBYTES, 1 << (nbytes - 1).bit_length())
        room = Page(np.empty(size + self._alignment, dtype=np.uint8)).segments[0]
        start = -address_of(room) % self._alignment
        memory = room[start : start + size]
        return Buffer(memory, size <= _LARGEST_KEPT_NBYTES and self._register(memory))

    def _register(self, memory: memoryview) -> bool:
        try:
            self._storage.register_buffer(memory)
        except HiCacheError:
            logger.debug("copies of pages are in memory that is not registered", exc_info=True)
            return False
        return True

    def _release(self, buffer: Buffer) -> None:
        if buffer.is_registered:
            try:
                self._storage.unregister_buffer(buffer.memory)
            except HiCacheError:
                logger.debug("a buffer stays registered", exc_info=True)
