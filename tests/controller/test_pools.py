"""Pools whose pages are cut into tiles: the key spaces of tiles, and which engines find them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import PAGE_TOKENS, FleetPool
from hicache_backends.memory import MemoryStorage
from pages import hash_of

from hicache_storage.controller import CachePool
from hicache_storage.host_pool import LAYOUTS, HostPool, PageShape, Tile
from hicache_storage.keys import Shard
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Verdict
from hicache_storage.topology import Extent, Grid, Topology

HASHES = [hash_of(number) for number in range(3)]
ALONE = Topology()
HEADS = FleetPool(
    Extent(layers=4, heads=8), layout="page_head", grid=Grid(head_group=2, layer_group=2)
)
LATENT = FleetPool(Extent(layers=5), grid=Grid(layer_group=1))


def save(store: PageStore, fleet: FleetPool, topology: Topology) -> int:
    """Write all pages with every writing rank of an engine. Return the number of stored pages."""
    stored = 0
    for rank in range(topology.size):
        pool = fleet.cache_pool(topology, rank)
        if pool is None or not pool.writes:
            continue
        for slot, page_hash in enumerate(HASHES):
            fleet.fill(pool, slot, page_hash)
        for part in pool.stored:
            store.open_space(part.space)
        outcome = store.save(pool.transfers(HASHES, range(len(HASHES))))
        stored += sum(verdicts.count(Verdict.OK) for verdicts in outcome.verdicts)
    return stored


def finds(store: PageStore, fleet: FleetPool, topology: Topology) -> list[bool]:
    """Return for each rank whether it finds every page with its own part of the model."""
    found: list[bool] = []
    for rank in range(topology.size):
        pool = fleet.cache_pool(topology, rank)
        if pool is None:
            continue
        for part in pool.stored:
            store.open_space(part.space)
        outcome = store.load(pool.transfers(HASHES, range(len(HASHES))))
        right = all(fleet.holds(pool, slot, page_hash) for slot, page_hash in enumerate(HASHES))
        found.append(outcome.arrived() == len(HASHES) and right)
    return found


class TestTopologies:
    FLEET = (
        Topology(tp_size=4),
        Topology(tp_size=2),
        Topology(tp_size=2, pp_size=2),
        Topology(pp_size=2),
        ALONE,
    )

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("writer", FLEET, ids=lambda t: f"tp{t.tp_size}-pp{t.pp_size}")
    def test_pages_of_one_are_read_by_all_others(self, layout: str, writer: Topology) -> None:
        fleet = replace(HEADS, layout=layout)
        with MemoryStorage() as storage, PageStore(storage) as store:
            save(store, fleet, writer)

            for reader in self.FLEET:
                assert [True] * reader.size == finds(store, fleet, reader)

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "page_head"])
    def test_stages_of_mla_share_their_layers(self, layout: str) -> None:
        fleet = replace(LATENT, layout=layout)
        with MemoryStorage() as storage, PageStore(storage) as store:
            save(store, fleet, Topology(tp_size=2, pp_size=2))

            assert [True] == finds(store, fleet, ALONE)
            assert [True] * 6 == finds(store, fleet, Topology(tp_size=2, pp_size=3))

    def test_ranks_that_share_a_head_share_its_pages(self) -> None:
        fleet = FleetPool(Extent(layers=2, heads=2), grid=Grid(head_group=1))
        with MemoryStorage() as storage, PageStore(storage) as store:
            assert 2 * len(HASHES) == save(store, fleet, Topology(tp_size=8))

            assert [True] * 8 == finds(store, fleet, Topology(tp_size=8))
            assert [True] == finds(store, fleet, ALONE)

    def test_without_a_grid_another_topology_finds_nothing(self) -> None:
        fleet = replace(HEADS, grid=Grid())
        with MemoryStorage() as storage, PageStore(storage) as store:
            save(store, fleet, Topology(tp_size=4))

            assert [True] * 4 == finds(store, fleet, Topology(tp_size=4))
            assert [False] * 2 == finds(store, fleet, Topology(tp_size=2))

    def test_another_layout_finds_nothing(self) -> None:
        with MemoryStorage() as storage, PageStore(storage) as store:
            save(store, HEADS, ALONE)

            assert [False] == finds(store, replace(HEADS, layout="page_first"), ALONE)


class TestNames:
    def test_a_tile_is_named_by_its_own_rectangle(self) -> None:
        pool = HEADS.cache_pool(Topology(tp_size=2, pp_size=2), 3)

        assert pool is not None
        assert [
            Shard(layers=(2, 4), heads=(4, 6)),
            Shard(layers=(2, 4), heads=(6, 8)),
        ] == [part.space.shard for part in pool.stored]
        assert pool.space.page_nbytes == sum(part.space.page_nbytes for part in pool.stored)

    def test_an_uncut_page_has_the_pools_own_key_space(self) -> None:
        pool = replace(HEADS, grid=Grid()).cache_pool(Topology(tp_size=2), 1)

        assert pool is not None
        assert [pool.space] == [part.space for part in pool.stored]

    def test_a_part_that_is_one_tile_is_shared_with_engines_that_do_not_cut(self) -> None:
        cut = HEADS.cache_pool(Topology(tp_size=4, pp_size=2), 0)
        uncut = replace(HEADS, grid=Grid()).cache_pool(Topology(tp_size=4, pp_size=2), 0)

        assert cut is not None
        assert uncut is not None
        assert cut.stored == uncut.stored


class TestRefusals:
    SHAPE = PageShape.mha(page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=3, dtype="bfloat16")

    def pool(self, shard: Shard, *tiles: Tile) -> CachePool:
        """Return a pool of this shard with these tiles."""
        space = HEADS.cache_pool(ALONE, 0)
        assert space is not None
        return CachePool(
            space=replace(space.space, shard=shard, page_nbytes=self.SHAPE.nbytes),
            host=HostPool(self.SHAPE, slots=1, layout="page_head", tiles=tiles),
        )

    def test_a_key_space_of_other_layers_than_the_host_pools(self) -> None:
        with pytest.raises(ValueError, match="the host pool has 2 layers of 2 heads"):
            self.pool(Shard(layers=(0, 4), heads=(0, 2)), Tile((0, 1)), Tile((1, 2)))

    def test_heads_that_the_key_space_does_not_name(self) -> None:
        with pytest.raises(ValueError, match="tiles split heads, but its key space has none"):
            self.pool(Shard(layers=(0, 2)), Tile((0, 2), (0, 1)), Tile((0, 2), (1, 2)))
