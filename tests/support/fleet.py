"""A model's KV cache as one array, of which every rank of every engine holds a part."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_storage.controller import CachePool
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.keys import KeySpace
from hicache_storage.topology import Extent, Grid, Topology

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE_TOKENS = 4
_DIM = 3

# The axes of a slot's part of a plane's array, in the order layer, head, token, dim.
_AXES = {
    "layer_first": (0, 2, 1, 3),
    "page_first": (1, 2, 0, 3),
    "page_first_direct": (0, 2, 1, 3),
    "page_head": (2, 0, 1, 3),
}


@dataclass(frozen=True)
class FleetPool:
    """One pool of a model, which engines with different topologies serve."""

    extent: Extent
    name: str = "kv"
    layout: str = "page_first"
    grid: Grid = field(default_factory=Grid)

    @property
    def planes(self) -> int:
        """How many planes a page has: 2 for K and V, 1 for a latent."""
        return 1 if self.extent.heads is None else 2

    def cache_pool(self, topology: Topology, rank: int, *, slots: int = 16) -> CachePool | None:
        """Return a rank's part of the pool with its host memory, or None if the rank has no part."""
        part = topology.part(self.extent, rank)
        if part is None:
            return None
        shape = self._shape(part.layers, part.heads)
        host = HostPool(
            shape,
            slots=slots,
            layout=self.layout,
            tiles=topology.tiles(self.extent, rank, self.grid),
        )
        space = KeySpace(
            model="fleet",
            dtype=shape.dtype,
            layout=self.layout,
            page_tokens=PAGE_TOKENS,
            page_nbytes=shape.nbytes,
            shard=part.shard,
            pool=self.name,
        )
        return CachePool(space=space, host=host, writes=part.writes)

    def model(self, page_hash: str, plane: int) -> npt.NDArray[np.uint16]:
        """Return one plane of a page of the whole model: unique numbers [layers, heads, tokens, dim]."""
        seed = hashlib.sha256(f"{self.name}/{plane}/{page_hash}".encode()).digest()
        shape = (self.extent.layers, self.extent.heads or 1, PAGE_TOKENS, _DIM)
        generator = np.random.default_rng(list(seed))
        return generator.integers(0, 2**16, size=shape, dtype=np.uint16)

    def fill(self, pool: CachePool, slot: int, page_hash: str) -> None:
        """Write a rank's part of a page into a slot."""
        for plane in range(self.planes):
            _plane(pool, plane, slot)[...] = self._part(pool, plane, page_hash)

    def holds(self, pool: CachePool, slot: int, page_hash: str) -> bool:
        """Return True if the slot holds the rank's heads and layers of this page."""
        return all(
            np.array_equal(_plane(pool, plane, slot), self._part(pool, plane, page_hash))
            for plane in range(self.planes)
        )

    def _part(self, pool: CachePool, plane: int, page_hash: str) -> npt.NDArray[np.uint16]:
        shard = pool.space.shard
        heads = shard.heads or (0, 1)
        return self.model(page_hash, plane)[slice(*shard.layers), slice(*heads)]

    def _shape(self, layers: int, heads: int | None) -> PageShape:
        if heads is None:
            return PageShape.mla(
                page_tokens=PAGE_TOKENS, layers=layers, kv_dim=_DIM, dtype="bfloat16"
            )
        return PageShape.mha(
            page_tokens=PAGE_TOKENS, layers=layers, heads=heads, head_dim=_DIM, dtype="bfloat16"
        )


def _plane(pool: CachePool, plane: int, slot: int) -> npt.NDArray[Any]:
    """Return a slot's part of the engine's own array, as (layers, heads, tokens, dim)."""
    array = pool.host.arrays()[plane]
    tokens = slice(slot * PAGE_TOKENS, (slot + 1) * PAGE_TOKENS)
    where: dict[str, tuple[Any, ...]] = {
        "layer_first": (slice(None), tokens),
        "page_first": (tokens,),
        "page_first_direct": (slot,),
        "page_head": (slot,),
    }
    layout = pool.host.layout
    part: npt.NDArray[Any] = array[where[layout]]
    return part.transpose(_AXES[layout])
