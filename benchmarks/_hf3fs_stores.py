"""The stores that `hf3fs.py` compares: the disk's own limit, ours, and SGLang's."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

import _sglang
from _store import Memory, Store
from hicache_backends.hf3fs import Hf3fsStorage

from hicache_storage.frame import FramedPage
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.transfer import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TIMEOUT_S = 600.0


class PlainSlots(Store):
    """One preadv or pwritev a page, round and round one preallocated file: what a disk can do."""

    def __init__(
        self,
        directory: Path,
        source: Memory,
        landing: Memory,
        *,
        direct: bool,
        threads: int,
        capacity_pages: int,
    ) -> None:
        super().__init__(source, landing)
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
        self._all(os.preadv, self.landing)

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


class OurStorage(Store):
    """`Hf3fsStorage`, called directly on this thread: a page is one segment, stored bare."""

    def __init__(self, directory: Path, source: Memory, landing: Memory, **settings: Any) -> None:
        super().__init__(source, landing)
        self.name = f"ours: Hf3fsStorage, {_how(settings)}"
        self._storage = _storage(directory, settings)
        self._space = _key_space(source.page_nbytes)
        self._storage.open_space(self._space)
        self._sources = [Page(view) for view in source.views]
        self._targets = [Page(view) for view in landing.views]

    def set(self) -> None:
        if not all(self._storage.batch_set(self._space, self.hashes, self._sources)):
            raise RuntimeError(f"Hf3fsStorage refused a page: {self._storage.stats()}")

    def get(self) -> None:
        if not all(self._storage.batch_get(self._space, self.hashes, self._targets)):
            raise RuntimeError(f"Hf3fsStorage lost a page: {self._storage.stats()}")

    def close(self) -> None:
        self._storage.close()


class OurPages(Store):
    """The page store over `Hf3fsStorage`: frames, verdicts, its own threads."""

    def __init__(
        self,
        directory: Path,
        source: Memory,
        landing: Memory,
        *,
        checksum: Literal["xxh3", "none"] = "xxh3",
        **settings: Any,
    ) -> None:
        super().__init__(source, landing)
        self.name = f"ours: page store, {checksum}, {_how(settings)}"
        self._storage = _storage(directory, settings)
        self._store = PageStore(
            self._storage, PageStoreSettings(checksum=checksum, timeout_s=TIMEOUT_S)
        )
        self._space = _key_space(source.page_nbytes)
        self._store.open_space(self._space)
        self._sources = _framed(source, self._store.frame_nbytes)
        self._targets = _framed(landing, self._store.frame_nbytes)

    def set(self) -> None:
        _expect_ok(self._store.save([Transfer(self._space, self.hashes, self._sources)]).verdicts)

    def get(self) -> None:
        _expect_ok(self._store.load([Transfer(self._space, self.hashes, self._targets)]).verdicts)

    def close(self) -> None:
        self._store.close()
        self._storage.close()


class TheirSlots(Store):
    """SGLang's `HiCacheHF3FS` with its mock client and its metadata in this process."""

    name = "HiCacheHF3FS, mock client"

    def __init__(
        self, directory: Path, source: Memory, landing: Memory, *, capacity_pages: int
    ) -> None:
        super().__init__(source, landing)
        nbytes = capacity_pages * source.page_nbytes
        self._backend = _sglang.hicache_hf3fs(directory, nbytes, source.page_nbytes)
        self._sources = _sglang.flat_pages(source)
        self._targets = _sglang.flat_pages(landing)

    def set(self) -> None:
        if not all(self._backend.batch_set(self.hashes, self._sources)):
            raise RuntimeError("HiCacheHF3FS refused a page")

    def get(self) -> None:
        if not all(self._backend.batch_get(self.hashes, self._targets)):
            raise RuntimeError("HiCacheHF3FS lost a page")

    def close(self) -> None:
        self._backend.close()


def _how(settings: dict[str, Any]) -> str:
    return "O_DIRECT" if settings["direct"] else "buffered"


def _storage(directory: Path, settings: dict[str, Any]) -> Hf3fsStorage:
    return Hf3fsStorage.from_config({"path": str(directory), "timeout_s": TIMEOUT_S, **settings})


def _key_space(page_nbytes: int) -> KeySpace:
    """Of some MHA model whose pages have this size."""
    return KeySpace(
        model="benchmarks/model",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=64,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
    )


def _framed(memory: Memory, frame_nbytes: int) -> list[FramedPage]:
    headers = Memory(memory.pages, max(frame_nbytes, 128)).views
    return [
        FramedPage(header, Page(view)) for header, view in zip(headers, memory.views, strict=True)
    ]


def _expect_ok(verdicts: Sequence[Sequence[Verdict]]) -> None:
    for number, verdict in enumerate(verdicts[0]):
        if verdict is not Verdict.OK:
            raise RuntimeError(f"the page store said {verdict.value} of page {number}")
