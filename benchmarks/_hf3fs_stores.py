"""The stores that `hf3fs.py` compares with ours: plain slots on disk, and SGLang's backend."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import _sglang
from _store import Memory, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class PlainSlots(Store):
    """Slots in one preallocated file, with one preadv or pwritev per page: the limit of the disk."""

    def __init__(
        self,
        directory: Path,
        source: Memory,
        destination: Memory,
        *,
        direct: bool,
        threads: int,
        capacity_pages: int,
    ) -> None:
        super().__init__(source, destination)
        how = "O_DIRECT" if direct else "buffered"
        self.name = f"plain slots, {how}, {threads} thread{'s' * (threads > 1)}"
        self._threads = threads
        self._capacity_pages = capacity_pages // source.pages * source.pages
        self._next = self._first = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._descriptor = os.open(directory / "slots", flags, 0o644)
        os.posix_fallocate(self._descriptor, 0, self._capacity_pages * source.page_nbytes)
        self._executor = ThreadPoolExecutor(threads)

    def set(self) -> None:
        self._first = self._next
        self._next = (self._first + self.source.pages) % self._capacity_pages
        self._all(os.pwritev, self.source)

    def get(self) -> None:
        self._all(os.preadv, self.destination)

    def close(self) -> None:
        self._executor.shutdown()
        os.close(self._descriptor)

    def _all(self, call: Callable[[int, list[memoryview], int], int], memory: Memory) -> None:
        def some(part: range) -> None:
            for number in part:
                offset = (self._first + number) * memory.page_nbytes
                if call(self._descriptor, [memory.views[number]], offset) != memory.page_nbytes:
                    raise RuntimeError("a page was not moved whole")

        step = -(-memory.pages // self._threads)
        parts = [
            range(start, min(start + step, memory.pages)) for start in range(0, memory.pages, step)
        ]
        if self._threads == 1:
            some(parts[0])
            return
        for _ in self._executor.map(some, parts):
            pass


class SGLangHf3fsStore(Store):
    """SGLang's `HiCacheHF3FS` with its mock client, and with its metadata in this process."""

    name = "HiCacheHF3FS, mock client"

    def __init__(
        self, directory: Path, source: Memory, destination: Memory, *, capacity_pages: int
    ) -> None:
        super().__init__(source, destination)
        nbytes = capacity_pages * source.page_nbytes
        self._backend = _sglang.hicache_hf3fs(directory, nbytes, source.page_nbytes)
        self._sources = _sglang.flat_pages(source)
        self._targets = _sglang.flat_pages(destination)

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        if not all(self._backend._batch_set(list(hashes), self._sources[part])):  # noqa: SLF001 - below the part that needs a host pool
            raise RuntimeError("HiCacheHF3FS refused a page")

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        if not all(self._backend._batch_get(list(hashes), self._targets[part])):  # noqa: SLF001 - as above
            raise RuntimeError("HiCacheHF3FS lost a page")

    def close(self) -> None:
        self._backend.close()
