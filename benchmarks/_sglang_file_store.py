"""SGLang's file backend, called as SGLang's controller calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from _our_stores import PAGE_TOKENS
from _sglang import flat_pages, hicache_file
from _store import Memory, Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

HEAD_DIM = 128

# Copying one page is too short for several threads: torch would wait longer than it copies.
torch.set_num_threads(1)


class HiCacheFileStore(Store):
    """SGLang's `HiCacheFile`, called as SGLang's controller calls it.

    With `host_pool`, a get also copies each flat page into a page-first MHA host pool, and a set
    copies it from there. The copies are the expressions of `set_from_flat_data_page` and
    `get_data_page` (pool_host/mha.py), and a request waits for them, too. The controller allocates
    flat pages for each get; here they are allocated once.
    """

    def __init__(
        self,
        directory: Path,
        source: Memory,
        destination: Memory,
        *,
        capacity_nbytes: int | None = None,
        host_pool: bool = False,
    ) -> None:
        super().__init__(source, destination)
        self.name = "HiCacheFile + host pool" if host_pool else "HiCacheFile"
        self._backend = hicache_file(directory, capacity_nbytes=capacity_nbytes)
        self._flat_source = flat_pages(source)
        self._flat_destination = flat_pages(destination)
        self._pool = _host_pool(destination) if host_pool else None

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        if self._pool is not None:
            for number, page in enumerate(self._flat_source):
                _copy_into_pool(self._pool, number, page)

    def set(self) -> None:
        pages = self._flat_source
        if self._pool is not None:
            pages = [_copy_from_pool(self._pool, number) for number in range(len(self.hashes))]
        if not self._backend.batch_set(self.hashes, pages):
            raise RuntimeError("HiCacheFile refused a page")

    def prepare_get(self, hashes: Sequence[str]) -> None:
        super().prepare_get(hashes)
        if self._pool is not None:
            self._pool.zero_()

    def get(self) -> None:
        for number, page in enumerate(self._backend.batch_get(self.hashes, self._flat_destination)):
            if page is None:
                raise RuntimeError("HiCacheFile lost a page")
            if self._pool is not None:
                _copy_into_pool(self._pool, number, page)

    def set_part(self, hashes: Sequence[str], part: slice) -> None:
        if not self._backend.batch_set(hashes, self._flat_source[part]):
            raise RuntimeError("HiCacheFile refused a page")

    def get_part(self, hashes: Sequence[str], part: slice) -> None:
        if None in self._backend.batch_get(hashes, self._flat_destination[part]):
            raise RuntimeError("HiCacheFile lost a page")

    def received(self) -> npt.NDArray[np.uint8]:
        if self._pool is not None:
            for number, page in enumerate(self._flat_destination):
                page.copy_(_copy_from_pool(self._pool, number))
        return super().received()


def _host_pool(memory: Memory) -> torch.Tensor:
    """Return a touched page-first MHA host pool: (K and V, tokens, layers, heads, dimensions)."""
    layers = memory.page_nbytes // (2 * PAGE_TOKENS * HEAD_DIM * torch.bfloat16.itemsize)
    shape = (2, memory.pages * PAGE_TOKENS, layers, 1, HEAD_DIM)
    return torch.ones(shape, dtype=torch.bfloat16)


def _copy_into_pool(pool: torch.Tensor, number: int, page: torch.Tensor) -> None:
    start = number * PAGE_TOKENS
    pool[:, start : start + PAGE_TOKENS] = page.reshape(2, PAGE_TOKENS, *pool.shape[2:])


def _copy_from_pool(pool: torch.Tensor, number: int) -> torch.Tensor:
    start = number * PAGE_TOKENS
    return pool[:, start : start + PAGE_TOKENS].flatten()
