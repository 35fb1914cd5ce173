"""The pools of a replay: what a rank holds of each, in host memory and in keys."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_storage.controller import CachePool
from hicache_storage.errors import ConfigError
from hicache_storage.host_pool import HostPool
from hicache_storage.topology import Extent, Grid, Topology

if TYPE_CHECKING:
    from contextlib import ExitStack

    from hicache_storage.replay.driver import ReplaySettings
    from hicache_storage.replay.models import KVShape, PoolShape


def extent_of(shape: KVShape) -> Extent:
    """The whole model's part of a pool."""
    return Extent(layers=shape.layers, heads=shape.heads if shape.kind == "mha" else None)


def rank_shape(shape: KVShape, topology: Topology, rank: int) -> KVShape:
    """What one rank of a stage holds of a pool.

    Raises:
        ConfigError: The ranks cannot share its heads evenly.
    """
    part = topology.part(extent_of(shape), rank)
    return shape if part is None else replace(shape, layers=part.layers, heads=part.heads or 1)


def cache_pools(settings: ReplaySettings, frame_nbytes: int, opened: ExitStack) -> list[CachePool]:
    """This rank's L2; `opened` gives it back.

    Raises:
        ConfigError: Shapes, layout, ranks or grid do not go together, or there is not as much memory.
    """
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.host_nbytes * settings.topology.size > memory_nbytes:
        ranks = f" on each of {settings.topology.size} ranks" if settings.topology.size > 1 else ""
        raise ConfigError(
            f"--host-size of {settings.host_nbytes} bytes{ranks}: this machine has {memory_nbytes}"
        )
    pools: list[CachePool] = []
    for pool in settings.pools:
        try:
            pools.append(_cache_pool(pool, settings, frame_nbytes, opened))
        except MemoryError as error:
            reason = str(error).partition(";")[0]
            raise ConfigError(
                f"--host-size of {settings.host_nbytes} bytes: {reason}; give less"
            ) from error
        except ValueError as error:
            raise ConfigError(f"pool {pool.name!r} ({pool.shape}): {error}") from error
    return pools


def _cache_pool(
    pool: PoolShape, settings: ReplaySettings, frame_nbytes: int, opened: ExitStack
) -> CachePool:
    extent, topology, rank = extent_of(pool.shape), settings.topology, settings.rank
    whole = pool.space(
        model=settings.model, layout=settings.layout, page_tokens=settings.page_tokens
    )
    part = topology.part(extent, rank)
    if part is None:
        raise ValueError(f"rank {rank} holds none of its layers")
    shape = rank_shape(pool.shape, topology, rank).page(settings.page_tokens)
    grid = settings.grid if extent.heads is not None else Grid()
    host = HostPool(
        shape,
        slots=settings.slots,
        layout=settings.layout,
        frame_nbytes=frame_nbytes,
        tiles=topology.tiles(extent, rank, grid),
    )
    return CachePool(
        space=replace(whole, shard=part.shard, page_nbytes=shape.nbytes),
        host=opened.enter_context(host),
        writes=part.writes,
    )
