"""Engines of several ranks in processes, over one directory: writers, readers, and lost ranks."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_engines
from fleet import FleetPool
from pages import hash_of
from rank_engines import EngineSpec, Served
from rank_workers import RankProcess, rank_processes

from hicache_storage.topology import Extent, Grid, Topology

PROMPT = [hash_of(number) for number in range(8)]
PAGES = len(PROMPT)
_FOR_EVER_S = 600.0

MHA = Extent(layers=4, heads=8)
MLA = Extent(layers=4)
MHA_DRAFT = Extent(layers=1, heads=8, stage_layers=(0, 1))
MLA_DRAFT = Extent(layers=1, stage_layers=(0, 1))
SQUARE = Topology(tp_size=2, pp_size=2)
WIDE = Topology(tp_size=4)


@dataclass(frozen=True)
class Engine:
    """The processes of a running engine."""

    ranks: list[RankProcess]

    def each(self, do: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on all ranks at the same time. Return the results."""
        answers = [rank.submit(do, *arguments) for rank in self.ranks]
        return [answer.result() for answer in answers]

    def serve(self, request_id: str) -> list[Served]:
        """Serve the prompt on every rank. Return the results."""
        return self.each(rank_engines.serve, request_id, PROMPT)


_places = itertools.count()


def started(
    processes: list[RankProcess],
    topology: Topology,
    model: tuple[FleetPool, ...],
    scratch: Path,
    *,
    timeout_s: float = _FOR_EVER_S,
    store_timeout_s: float = 30,
) -> Engine:
    """Start an engine over `scratch`, on as many of the processes as it needs."""
    spec = EngineSpec(
        rendezvous=str(scratch / f"rendezvous-{next(_places)}"),
        directory=str(scratch / "store"),
        topology=topology,
        model=model,
        timeout_s=timeout_s,
        store_timeout_s=store_timeout_s,
    )
    ranks = processes[: topology.size]
    starting = [
        process.submit(rank_engines.start, spec, rank) for rank, process in enumerate(ranks)
    ]
    for future in starting:
        future.result()
    return Engine(ranks)


@pytest.fixture(scope="module")
def shared() -> Iterator[list[RankProcess]]:
    """Yield four processes that no test ends."""
    with rank_processes(4) as ranks:
        yield ranks


@pytest.fixture
def processes(shared: list[RankProcess]) -> Iterator[list[RankProcess]]:
    """Yield the shared processes, and stop their engines afterwards."""
    yield shared
    for rank in shared:
        rank.submit(rank_engines.stop).result()


def found(served: list[Served]) -> list[tuple[int, bool]]:
    """Return for each rank the number of usable pages, and whether their content was right."""
    return [(one.pages, one.right) for one in served]


def unsplit(*extents: Extent) -> tuple[FleetPool, ...]:
    """Return the target and the draft of an engine without pipeline stages."""
    return tuple(
        FleetPool(Extent(layers=extent.layers, heads=extent.heads), name=name)
        for name, extent in zip(("kv", "draft"), extents, strict=True)
    )


class TestWriters:
    @pytest.mark.parametrize(
        ("target", "draft", "written"),
        [
            (MHA, MHA_DRAFT, [1, 1, 2, 2]),
            (MLA, MHA_DRAFT, [1, 0, 2, 1]),
            (MHA, MLA_DRAFT, [1, 1, 2, 1]),
            (MLA, MLA_DRAFT, [1, 0, 2, 0]),
        ],
        ids=["mha-mha", "mla-mha", "mha-mla", "mla-mla"],
    )
    def test_on_two_stages_of_two_ranks_with_the_draft_on_the_last(
        self,
        processes: list[RankProcess],
        tmp_path: Path,
        target: Extent,
        draft: Extent,
        written: list[int],
    ) -> None:
        model = (FleetPool(target, name="kv"), FleetPool(draft, name="draft"))
        engine = started(processes, SQUARE, model, tmp_path)

        assert [pools * PAGES for pools in written] == engine.each(rank_engines.compute, PROMPT)
        assert [0] * 4 == engine.each(rank_engines.clear_l2)
        assert [(PAGES, True)] * 4 == found(engine.serve("r"))

    @pytest.mark.parametrize(
        ("target", "draft", "written"),
        [
            (MHA, MHA_DRAFT, [2, 2, 2, 2]),
            (MLA, MHA_DRAFT, [2, 1, 1, 1]),
            (MHA, MLA_DRAFT, [2, 1, 1, 1]),
            (MLA, MLA_DRAFT, [2, 0, 0, 0]),
            (Extent(layers=2, heads=2), MLA_DRAFT, [2, 0, 1, 0]),
        ],
        ids=["mha-mha", "mla-mha", "mha-mla", "mla-mla", "fewer-heads-than-ranks"],
    )
    def test_on_four_ranks(
        self,
        processes: list[RankProcess],
        tmp_path: Path,
        target: Extent,
        draft: Extent,
        written: list[int],
    ) -> None:
        engine = started(processes, WIDE, unsplit(target, draft), tmp_path)

        assert [pools * PAGES for pools in written] == engine.each(rank_engines.compute, PROMPT)
        assert [0] * 4 == engine.each(rank_engines.clear_l2)
        assert [(PAGES, True)] * 4 == found(engine.serve("r"))


class TestTopologies:
    MODEL = (
        FleetPool(MHA, name="kv", layout="page_head", grid=Grid(head_group=2, layer_group=2)),
        FleetPool(
            Extent(layers=1, heads=8), name="draft", layout="page_head", grid=Grid(head_group=2)
        ),
    )

    def test_pages_of_four_ranks_are_read_by_two_and_by_one(
        self, processes: list[RankProcess], tmp_path: Path
    ) -> None:
        model = self.MODEL
        started(processes, WIDE, model, tmp_path).each(rank_engines.compute, PROMPT)

        for topology in (Topology(tp_size=2), Topology()):
            engine = started(processes, topology, model, tmp_path)
            assert [(PAGES, True)] * topology.size == found(engine.serve("r"))

    @pytest.mark.parametrize(
        ("writer", "reader"),
        [(Topology(), Topology(pp_size=2)), (Topology(pp_size=2), Topology())],
        ids=["one-to-two-stages", "two-stages-to-one"],
    )
    def test_stages_share_the_target(
        self, processes: list[RankProcess], tmp_path: Path, writer: Topology, reader: Topology
    ) -> None:
        model = self.MODEL[:1]
        started(processes, writer, model, tmp_path).each(rank_engines.compute, PROMPT)

        engine = started(processes, reader, model, tmp_path)
        assert [(PAGES, True)] * reader.size == found(engine.serve("r"))


class TestReadFaults:
    MODEL = (FleetPool(MLA, name="kv"), FleetPool(Extent(layers=1, heads=8), name="draft"))

    @pytest.fixture
    def engine(self, processes: list[RankProcess], tmp_path: Path) -> Engine:
        """Start four ranks whose pages are in L3 alone."""
        engine = started(processes, WIDE, self.MODEL, tmp_path, store_timeout_s=1)
        engine.each(rank_engines.compute, PROMPT)
        engine.each(rank_engines.clear_l2)
        return engine

    @pytest.mark.parametrize("kind", ["fails", "hangs"])
    def test_a_rank_that_cannot_read_shortens_the_prefix_of_all(
        self, engine: Engine, kind: str
    ) -> None:
        engine.ranks[2].submit(rank_engines.set_read_fault, kind).result()
        served = engine.serve("r")

        assert [(0, True)] * 4 == found(served)
        assert "missing on another rank (rank 2)" in served[0].explained
        assert "rank" not in served[2].explained

        engine.ranks[2].submit(rank_engines.set_read_fault, "").result()
        assert [(PAGES, True)] * 4 == found(engine.serve("again"))
        assert [0] * 4 == engine.each(rank_engines.clear_l2)

    def test_whatever_fails_where_all_ranks_find_the_same(self, engine: Engine) -> None:
        turns = 60
        answers = [
            process.submit(rank_engines.serve_with_faults, 7, rank, turns, PROMPT)
            for rank, process in enumerate(engine.ranks)
        ]
        first, *others = [answer.result() for answer in answers]

        assert [first] * 3 == others
        assert {-1, 0} < set(first)
        assert [0] * 4 == engine.each(rank_engines.counter, "ranks_lost")

    def test_ranks_that_serve_different_requests_use_nothing_and_go_on(
        self, engine: Engine
    ) -> None:
        answers = [
            rank.submit(rank_engines.serve, f"r-{rank is engine.ranks[0]}", PROMPT)
            for rank in engine.ranks
        ]

        assert [(0, True)] * 4 == found([answer.result() for answer in answers])
        assert [(0, True)] * 4 == found(engine.serve("again"))
        assert [1] * 4 == engine.each(rank_engines.counter, "ranks_lost")


class TestDeath:
    MODEL = (FleetPool(MHA, name="kv"),)

    @pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
    def test_a_survivor_serves_on_without_a_prefix(self, tmp_path: Path, fate: int) -> None:
        timeout_s = 1.0 if fate == signal.SIGSTOP else _FOR_EVER_S
        with rank_processes(3) as processes:
            topology = Topology(tp_size=2)
            engine = started(processes, topology, self.MODEL, tmp_path, timeout_s=timeout_s)
            engine.each(rank_engines.compute, PROMPT)
            survivor = engine.ranks[0]
            engine.ranks[1].signal(fate)

            for turn in range(3):
                served = survivor.submit(rank_engines.serve, f"r-{turn}", PROMPT).result()
                assert (0, True) == (served.pages, served.right)
            assert 0 == survivor.submit(rank_engines.clear_l2).result()
            survivor.submit(rank_engines.stop).result()

            fresh = started([survivor, processes[2]], topology, self.MODEL, tmp_path, timeout_s=30)
            assert [(PAGES, True)] * 2 == found(fresh.serve("after the restart"))

    def test_a_rank_that_dies_while_others_wait_for_its_answer(self, tmp_path: Path) -> None:
        with rank_processes(2) as processes:
            engine = started(processes, Topology(tp_size=2), self.MODEL, tmp_path)
            engine.each(rank_engines.compute, PROMPT)
            waiting = engine.ranks[0].submit(rank_engines.serve, "r", PROMPT)
            engine.ranks[1].signal(signal.SIGKILL)

            served = waiting.result()
            assert 0 == served.pages
            assert "ranks" in served.explained
            engine.ranks[0].submit(rank_engines.stop).result()
