from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import ROOT

from hicache_storage.errors import ConfigError
from hicache_storage.host_pool import Tile
from hicache_storage.keys import Shard
from hicache_storage.topology import Extent, Grid, Part, Topology

MHA = Extent(layers=32, heads=8)
MLA = Extent(layers=61)
SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


def shards(topology: Topology, extent: Extent) -> list[Shard]:
    return [part.shard for part in topology.parts(extent)]


class TestParts:
    def test_ranks_of_a_stage_split_the_heads(self) -> None:
        heads = [shard.heads for shard in shards(Topology(tp_size=4), MHA)]

        assert [(0, 2), (2, 4), (4, 6), (6, 8)] == heads

    def test_stages_split_the_layers_and_the_last_have_one_more(self) -> None:
        layers = [shard.layers for shard in shards(Topology(pp_size=4), MLA)]

        assert [(0, 15), (15, 30), (30, 45), (45, 61)] == layers

    def test_ranks_of_one_stage_come_one_after_another(self) -> None:
        part = Topology(tp_size=2, pp_size=2).parts(MHA)[2]

        assert Part(shard=Shard(layers=(16, 32), heads=(0, 4)), rank=2, writer=2) == part
        assert (16, 4) == (part.layers, part.heads)

    def test_an_engine_may_say_how_its_layers_are_split(self) -> None:
        uneven = Extent(layers=61, stage_layers=(40, 21))

        assert [(0, 40), (40, 61)] == [s.layers for s in shards(Topology(pp_size=2), uneven)]

    def test_a_draft_may_live_on_the_last_stage(self) -> None:
        draft = Extent(layers=1, heads=4, stage_layers=(0, 1))
        topology = Topology(tp_size=2, pp_size=2)

        assert topology.part(draft, 0) is None
        assert [2, 3] == [part.rank for part in topology.parts(draft)]

    @settings(deadline=None)  # The machine may be busy.
    @given(
        tp_size=SIZES, pp_size=SIZES, layers=st.integers(16, 64), heads=st.sampled_from([0, 1, 48])
    )
    def test_every_layer_of_every_head_is_written_once(
        self, tp_size: int, pp_size: int, layers: int, heads: int
    ) -> None:
        written = Topology(tp_size=tp_size, pp_size=pp_size).writers(
            Extent(layers=layers, heads=heads or None)
        )

        cells = [
            (layer, head)
            for shard in written
            for layer in range(*shard.layers)
            for head in range(*(shard.heads or (0, 1)))
        ]
        assert len(set(cells)) == len(cells) == layers * (heads or 1)


class TestWriters:
    def test_of_mla_the_first_rank_of_each_stage_writes(self) -> None:
        topology = Topology(tp_size=4, pp_size=2)

        assert [0, 4] == list(topology.writers(MLA).values())
        assert [0, 4] == [part.rank for part in topology.parts(MLA) if part.writes]

    def test_of_sharded_heads_every_rank_writes(self) -> None:
        topology = Topology(tp_size=4, pp_size=2)

        assert list(range(8)) == list(topology.writers(MHA).values())

    def test_of_ranks_that_share_a_head_the_first_writes(self) -> None:
        topology = Topology(tp_size=8)
        parts = topology.parts(Extent(layers=2, heads=2))

        assert [(0, 1)] * 4 + [(1, 2)] * 4 == [part.shard.heads for part in parts]
        assert [0, 4] == [part.rank for part in parts if part.writes]


class TestTiles:
    def test_a_part_is_cut_into_groups_counted_from_its_own_start(self) -> None:
        grid = Grid(head_group=2, layer_group=8)
        tiles = Topology(tp_size=2, pp_size=2).tiles(MHA, 3, grid)

        assert (
            Tile((0, 8), (0, 2)),
            Tile((0, 8), (2, 4)),
            Tile((8, 16), (0, 2)),
            Tile((8, 16), (2, 4)),
        ) == tiles

    def test_without_groups_a_part_is_one_tile(self) -> None:
        assert (Tile((0, 32), (0, 4)),) == Topology(tp_size=2).tiles(MHA, 1, Grid())

    def test_the_last_group_of_layers_may_be_smaller(self) -> None:
        tiles = Topology(pp_size=4).tiles(MLA, 3, Grid(layer_group=15))

        assert (Tile((0, 15)), Tile((15, 16))) == tiles

    def test_the_coarsest_grid_of_a_fleet_fits_all_of_it(self) -> None:
        fleet = [Topology(tp_size=4), Topology(tp_size=2, pp_size=2), Topology()]

        assert Grid(head_group=2, layer_group=16) == Grid.coarsest(MHA, fleet)
        assert Grid(layer_group=30) == Grid.coarsest(MLA, [Topology(pp_size=2), Topology()])

    @settings(deadline=None)  # The machine may be busy.
    @given(
        st.lists(st.tuples(SIZES, st.sampled_from([1, 2, 3])), min_size=1, max_size=4),
        st.sampled_from([Extent(layers=61, heads=48), MLA]),
    )
    def test_every_topology_tiles_the_coarsest_grid(
        self, sizes: list[tuple[int, int]], extent: Extent
    ) -> None:
        fleet = [Topology(tp_size=tp_size, pp_size=pp_size) for tp_size, pp_size in sizes]
        grid = Grid.coarsest(extent, fleet)

        for topology in fleet:
            for rank in range(topology.size):
                assert topology.tiles(extent, rank, grid)


class TestRefusals:
    @pytest.mark.parametrize(
        ("topology", "extent", "grid", "complaint", "advice"),
        [
            (
                Topology(tp_size=8),
                MHA,
                Grid(head_group=2),
                "tp_size 8 does not tile 8 KV heads in groups of 2",
                "tp_size 1, 2 or 4, or head_group 1",
            ),
            (
                Topology(pp_size=2),
                MLA,
                Grid(layer_group=4),
                "pp_size 2 splits 61 layers at 30, which does not tile groups of 4",
                "pp_size 1, 3, 5 or 15, or layer_group 30",
            ),
            (
                Topology(tp_size=8, pp_size=2),
                MHA,
                Grid(head_group=8, layer_group=32),
                (
                    "tp_size 8 does not tile 8 KV heads in groups of 8; pp_size 2 splits 32 layers at"
                    " 16, which does not tile groups of 32"
                ),
                "tp_size 1, or head_group 1; and pp_size 1, or layer_group 16",
            ),
        ],
    )
    def test_a_topology_that_does_not_tile_the_grid_gets_a_suggestion(
        self, topology: Topology, extent: Extent, grid: Grid, complaint: str, advice: str
    ) -> None:
        for rank in range(topology.size):
            with pytest.raises(ConfigError) as caught:
                topology.tiles(extent, rank, grid)

            assert f"{complaint}: use {advice}" == str(caught.value)

    def test_heads_that_ranks_cannot_share_evenly(self) -> None:
        with pytest.raises(ConfigError, match="use tp_size 1, 2, 4 or 8, or a multiple of 8"):
            Topology(tp_size=3).part(MHA, 0)

    def test_more_stages_than_layers(self) -> None:
        with pytest.raises(ConfigError, match="use pp_size 1 or 2, or say with stage_layers"):
            Topology(pp_size=3).part(Extent(layers=2), 0)

    def test_a_split_that_is_of_other_stages(self) -> None:
        with pytest.raises(ConfigError, match="are for 2 stages, but pp_size is 3"):
            Topology(pp_size=3).part(Extent(layers=2, stage_layers=(1, 1)), 0)

    def test_a_split_of_other_layers(self) -> None:
        with pytest.raises(ConfigError, match=r"stage_layers \(1, 2\) must add up to 2 layers"):
            Extent(layers=2, stage_layers=(1, 2))

    def test_a_rank_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match="no rank 2: this engine has ranks 0 to 1"):
            Topology(tp_size=2).part(MHA, 2)

    def test_tiles_of_a_rank_that_holds_nothing(self) -> None:
        draft = Extent(layers=1, stage_layers=(0, 1))

        with pytest.raises(ValueError, match="rank 0 holds nothing"):
            Topology(pp_size=2).tiles(draft, 0, Grid())


@pytest.mark.parametrize("value", [True, 2.0, "2", 0, -1, 2**64, 10**400])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Topology, "tp_size"),
        (Topology, "pp_size"),
        (Grid, "head_group"),
        (Grid, "layer_group"),
        (partial(Extent, layers=2), "heads"),
        (Extent, "layers"),
    ],
)
def test_a_size_is_a_whole_number_from_one_on(
    make: Callable[..., object], name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be (an integer|at least 1|at most)"):
        make(**{name: value})


@pytest.mark.parametrize("split", [(True, 1), (1.0, 1), (-1, 3), (), (1, 2)])
def test_the_layers_of_stages_are_whole_numbers_that_add_up(split: Any) -> None:
    with pytest.raises(ConfigError, match=r"^stage_layers"):
        Extent(layers=2, stage_layers=split)


def test_the_refusal_that_docs_ranks_quotes_is_the_actual_one() -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(tp_size=8).tiles(MHA, 0, Grid(head_group=2))

    assert f"\n{caught.value}\n" in (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
