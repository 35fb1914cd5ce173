"""A pool of the cache: its slots in host memory, and how its pages are called in storage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hicache_storage.host_pool.tiles import tile_nbytes
from hicache_storage.page_store.lookup import HitPolicy, PoolSpec
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.host_pool import HostPool, Tile
    from hicache_storage.keys import KeySpace


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePool:
    """One pool of the cache: target, draft or side pool, all handled alike."""

    space: KeySpace
    """Bare; its page is what `host` holds in a slot. Its shard is what this rank holds."""
    host: HostPool
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 1
    """For TRAILING_PAGES: how many pages in front of the prefix's end are needed."""
    required: bool = True
    """No prefix is usable without it. A draft's pools may be optional, by the controller's settings."""
    writes: bool = True
    """This rank writes the pool's pages to L3: of ranks that hold the same bytes, one does."""
    stored: tuple[PoolSpec, ...] = field(init=False, repr=False, compare=False)
    """As the page store sees it: a page of this pool is in storage when it is in all of these, one for
    each tile of the host pool. A tile goes by its own rectangle: ranks that have it share it."""

    def __post_init__(self) -> None:
        if self.space.page_nbytes != self.host.shape.nbytes:
            raise ValueError(
                f"pool {self.space.pool!r}: the key space says {self.space.page_nbytes} bytes a page,"
                f" the host pool holds {self.host.shape.nbytes}"
            )
        if self.space.layout != self.host.layout:
            raise ValueError(
                f"pool {self.space.pool!r}: the key space says layout {self.space.layout!r}, the host"
                f" pool has {self.host.layout!r}"
            )
        if len(self.host.tiles) > 1:
            self._check_cut()
        stored = tuple(
            PoolSpec(
                space=self._tile_space(tile),
                hit_policy=self.hit_policy,
                window_pages=self.window_pages,
            )
            for tile in self.host.tiles
        )
        object.__setattr__(self, "stored", stored)

    def transfers(self, hashes: Sequence[str], slots: Sequence[int]) -> list[Transfer]:
        """The pages in `slots` on their way to or from storage: one transfer for each of `stored`."""
        return [
            Transfer(pool.space, hashes, [self.host.framed_page(slot, tile) for slot in slots])
            for tile, pool in enumerate(self.stored)
        ]

    def _check_cut(self) -> None:
        """Refuse tiles whose place in the model the key space does not tell."""
        shard, (layers, heads) = self.space.shard, _extent(self.host)
        if shard.layers[1] - shard.layers[0] != layers or (
            shard.heads is not None and shard.heads[1] - shard.heads[0] != heads
        ):
            raise ValueError(
                f"pool {self.space.pool!r}: the key space says {shard}, the host pool holds"
                f" {layers} layers of {heads} heads"
            )
        if shard.heads is None and any(
            tile.heads not in (None, (0, heads)) for tile in self.host.tiles
        ):
            raise ValueError(
                f"pool {self.space.pool!r}: tiles cut heads, and its key space has no heads: say which"
                " they are in its shard, or cut layers only"
            )

    def _tile_space(self, tile: Tile) -> KeySpace:
        """What a tile goes by: of a page that is not cut, the page's own name."""
        if len(self.host.tiles) == 1:
            return self.space
        shard, (_, heads) = self.space.shard, _extent(self.host)
        rectangle = replace(
            shard,
            layers=_within(shard.layers, tile.layers),
            heads=shard.heads and _within(shard.heads, tile.heads or (0, heads)),
        )
        page_nbytes = tile_nbytes(self.host.shape, tile)
        return replace(self.space, shard=rectangle, page_nbytes=page_nbytes)


def _extent(host: HostPool) -> tuple[int, int]:
    """Layers and heads of its pages."""
    return host.shape.layers, host.shape.planes[0][0]


def _within(whole: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    """`part` of a range, in the numbers that the range is in."""
    return whole[0] + part[0], whole[0] + part[1]
