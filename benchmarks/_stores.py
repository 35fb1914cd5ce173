"""The stores that are compared: SGLang's, and ours bare and below the page store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from _sglang import hicache_file
from _store import Memory, Store
from hicache_backends.file import FileStorage

from hicache_storage.frame import FramedPage
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.transfer import Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

PAGE_TOKENS = 64
HEAD_DIM = 128
TIMEOUT_S = 600.0

# One copy of a page is too short to share: with more threads torch waits longer than it copies.
torch.set_num_threads(1)


class HiCacheFileStore(Store):
    """SGLang's `HiCacheFile`, called as its controller calls it.

    With `host_pool`, a get also copies each flat page into a page-first MHA host pool, and a set out of
    it: the expressions of `set_from_flat_data_page` and `get_data_page` (pool_host/mha.py), which a
    request waits for too. The flat pages that the controller allocates anew for each get are made once.
    """

    def __init__(
        self,
        directory: Path,
        source: Memory,
        landing: Memory,
        *,
        capacity_nbytes: int | None = None,
        host_pool: bool = False,
    ) -> None:
        super().__init__(source, landing)
        self.name = "HiCacheFile + host pool" if host_pool else "HiCacheFile"
        self._backend = hicache_file(directory, capacity_nbytes=capacity_nbytes)
        self._flat_source = _flat_pages(source)
        self._flat_landing = _flat_pages(landing)
        self._pool = _host_pool(landing) if host_pool else None

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        if self._pool is not None:
            for number, page in enumerate(self._flat_source):
                _into_pool(self._pool, number, page)

    def set(self) -> None:
        pages = self._flat_source
        if self._pool is not None:
            pages = [_out_of_pool(self._pool, number) for number in range(len(self.hashes))]
        if not self._backend.batch_set(self.hashes, pages):
            raise RuntimeError("HiCacheFile refused a page")

    def prepare_get(self, hashes: Sequence[str]) -> None:
        super().prepare_get(hashes)
        if self._pool is not None:
            self._pool.zero_()

    def get(self) -> None:
        for number, page in enumerate(self._backend.batch_get(self.hashes, self._flat_landing)):
            if page is None:
                raise RuntimeError("HiCacheFile lost a page")
            if self._pool is not None:
                _into_pool(self._pool, number, page)

    def landed(self) -> npt.NDArray[np.uint8]:
        if self._pool is not None:
            for number, page in enumerate(self._flat_landing):
                page.copy_(_out_of_pool(self._pool, number))
        return super().landed()


class OurFileStore(Store):
    """`FileStorage`, called directly on this thread: a page is one segment, stored bare."""

    def __init__(self, directory: Path, source: Memory, landing: Memory, **settings: Any) -> None:
        super().__init__(source, landing)
        self.name = "ours: FileStorage"
        self._storage = file_storage(directory, settings)
        self._space = key_space(source.page_nbytes)
        self._storage.open_space(self._space)
        self._sources = [Page(view) for view in source.views]
        self._targets = [Page(view) for view in landing.views]

    def set(self) -> None:
        if not all(self._storage.batch_set(self._space, self.hashes, self._sources)):
            raise RuntimeError(f"FileStorage refused a page: {self._storage.stats()}")

    def get(self) -> None:
        if not all(self._storage.batch_get(self._space, self.hashes, self._targets)):
            raise RuntimeError(f"FileStorage lost a page: {self._storage.stats()}")

    def close(self) -> None:
        self._storage.close()


class OurPageStore(Store):
    """The page store over `FileStorage`: frames, verdicts, as many threads as it has by default."""

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
        self.name = f"ours: page store, {checksum}"
        self._storage = file_storage(directory, settings)
        chosen = PageStoreSettings(checksum=checksum, timeout_s=TIMEOUT_S)
        self._store = PageStore(self._storage, chosen)
        self._space = key_space(source.page_nbytes)
        self._store.open_space(self._space)
        self._sources = _framed(source, self._store.frame_nbytes)
        self._targets = _framed(landing, self._store.frame_nbytes)

    def set(self) -> None:
        outcome = self._store.save([Transfer(self._space, self.hashes, self._sources)])
        _expect_ok(outcome.verdicts[0])

    def get(self) -> None:
        outcome = self._store.load([Transfer(self._space, self.hashes, self._targets)])
        _expect_ok(outcome.verdicts[0])

    def close(self) -> None:
        self._store.close()
        self._storage.close()


def file_storage(directory: Path, settings: dict[str, Any]) -> FileStorage:
    return FileStorage.from_config({"path": str(directory), "timeout_s": TIMEOUT_S, **settings})


def key_space(page_nbytes: int) -> KeySpace:
    """Of some MHA model whose pages have this size."""
    return KeySpace(
        model="benchmarks/model",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=PAGE_TOKENS,
        page_nbytes=page_nbytes,
        shard=Shard(layers=(0, 32), heads=(0, 8)),
    )


def _framed(memory: Memory, frame_nbytes: int) -> list[FramedPage]:
    headers = Memory(memory.pages, frame_nbytes).views
    return [
        FramedPage(header, Page(view)) for header, view in zip(headers, memory.views, strict=True)
    ]


def _expect_ok(verdicts: Sequence[Verdict]) -> None:
    for number, verdict in enumerate(verdicts):
        if verdict is not Verdict.OK:
            raise RuntimeError(f"the page store said {verdict.value} of page {number}")


def _flat_pages(memory: Memory) -> list[torch.Tensor]:
    from_numpy = cast("Any", torch).from_numpy
    return [from_numpy(row).view(torch.bfloat16) for row in memory.rows]


def _host_pool(memory: Memory) -> torch.Tensor:
    """(K and V, tokens, layers, heads, dimensions): a page-first MHA host pool, touched."""
    layers = memory.page_nbytes // (2 * PAGE_TOKENS * HEAD_DIM * torch.bfloat16.itemsize)
    shape = (2, memory.pages * PAGE_TOKENS, layers, 1, HEAD_DIM)
    return torch.ones(shape, dtype=torch.bfloat16)


def _into_pool(pool: torch.Tensor, number: int, page: torch.Tensor) -> None:
    start = number * PAGE_TOKENS
    pool[:, start : start + PAGE_TOKENS] = page.reshape(2, PAGE_TOKENS, *pool.shape[2:])


def _out_of_pool(pool: torch.Tensor, number: int) -> torch.Tensor:
    start = number * PAGE_TOKENS
    return pool[:, start : start + PAGE_TOKENS].flatten()
