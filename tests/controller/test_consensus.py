"""Consensus of ranks on every request, with missing pages and failing stores. The ranks are threads."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from engines import (
    PROMPT,
    ThreadRanks,
    cache_pools,
    compute,
    delete_pages,
    engine_on,
    is_right,
    leaked,
    on_each_rank,
    windowed,
)
from pages import hash_of
from stores import HookedStorage, failing

from hicache_storage.backend_support.counters import Counters
from hicache_storage.controller import (
    CacheController,
    CachePool,
    Channel,
    ControllerSettings,
    Reason,
    SingleRank,
)
from hicache_storage.controller.consensus import Consensus
from hicache_storage.controller.pools import PoolSet
from hicache_storage.controller.ranks import Topic
from hicache_storage.errors import StorageUnavailable


class Fleet:
    """The ranks of an engine, each with its own storage and L2."""

    def __init__(self, stack: ExitStack, size: int, *, timeout_s: float, make: Any) -> None:
        self.storages = [HookedStorage() for _ in range(size)]
        self.engines = [
            stack.enter_context(engine_on(storage, make(), ranks=ranks))
            for storage, ranks in zip(self.storages, ThreadRanks.of(size, timeout_s), strict=True)
        ]

    def compute(self, hashes: Sequence[str], **more: Any) -> None:
        for engine in self.engines:
            compute(engine, hashes, **more)
            assert engine.drain(20)

    def on_each_rank(self, act: Callable[[int, CacheController], int]) -> list[int]:
        """Run `act` in a thread of each rank. Return the results."""
        return on_each_rank(
            lambda rank: act(rank, self.engines[rank]), len(self.engines), timeout_s=60
        )

    def fetch(self, request_id: str, hashes: Sequence[str]) -> list[int]:
        """Prefetch a prompt on each rank and check the pages. Return how many pages each rank got."""

        def act(_: int, engine: CacheController) -> int:
            with engine.prefetch(request_id, hashes).result() as lease:
                assert is_right(lease)
                return lease.pages

        return self.on_each_rank(act)

    def clear_l2(self) -> None:
        """Clear every L2, so that later pages come from L3."""
        for engine in self.engines:
            assert engine.cache.clear() == 0


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def make(
            size: int = 3,
            *,
            timeout_s: float = 20,
            pools: Callable[[], list[CachePool]] = cache_pools,
        ) -> Fleet:
            return Fleet(stack, size, timeout_s=timeout_s, make=pools)

        yield make


def lose(storage: HookedStorage, page: int, pool: str = "kv") -> None:
    delete_pages(storage, pool, PROMPT[page : page + 1])


def test_the_rank_with_the_shortest_prefix_is_named(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet()
    ranks.compute(PROMPT)
    ranks.clear_l2()
    lose(ranks.storages[1], 9)
    lose(ranks.storages[2], 6, "draft")

    assert ranks.fetch("r", PROMPT) == [6, 6, 6]

    first, _, last = (engine.explain("r") for engine in ranks.engines)
    assert (first.reason, first.rank) == (Reason.OTHER_RANK, 2)
    assert (last.reason, last.pool, last.first_missing) == (Reason.ABSENT, "draft", 6)
    assert "page 6 is missing on another rank (rank 2)" in str(first)


def test_no_rank_loads_a_page_that_another_rank_lacks(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet(2)
    ranks.compute(PROMPT)
    ranks.clear_l2()
    lose(ranks.storages[1], 4)
    ranks.fetch("r", PROMPT)

    assert ranks.engines[0].stats()["loaded_pages"] == 4


def test_a_page_in_l2_of_one_rank_is_loaded_on_the_other(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet(2)
    ranks.compute(PROMPT)
    ranks.engines[1].cache.clear()

    assert ranks.fetch("r", PROMPT) == [16, 16]


def test_a_page_that_does_not_arrive_on_one_rank_ends_the_prefix_on_all(
    fleet: Callable[..., Fleet],
) -> None:
    """The ranks have agreed on 16 pages, then the store of one rank fails."""
    ranks = fleet(2)
    ranks.compute(PROMPT)
    ranks.clear_l2()
    ranks.storages[1].hooks["batch_get"] = failing(StorageUnavailable("down"))

    assert ranks.fetch("r", PROMPT) == [0, 0]
    ranks.storages[1].hooks.clear()
    assert ranks.fetch("again", PROMPT) == [16, 16]
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]


def test_lengths_are_agreed_on_not_their_minimum(fleet: Callable[..., Fleet]) -> None:
    """A rank that can use 16 or 8 pages and a rank that can use 12 or 8 pages use 8, not 12."""
    ranks = fleet(2, pools=windowed)
    compute(ranks.engines[0], PROMPT, ends=[8, 16])
    compute(ranks.engines[1], PROMPT, ends=[8, 12])
    for engine in ranks.engines:
        assert engine.drain(20)
    ranks.clear_l2()

    assert ranks.fetch("r", PROMPT) == [8, 8]


def test_a_rank_without_a_store_takes_part(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet(2)
    ranks.compute(PROMPT)
    ranks.engines[1].detach()
    ranks.engines[0].cache.clear()
    assert ranks.fetch("l2", PROMPT) == [16, 16]
    ranks.clear_l2()

    assert ranks.fetch("r", PROMPT) == [0, 0]
    assert ranks.engines[0].explain("r").rank == 1


def test_a_request_that_was_cancelled_before_its_turn_is_answered(
    fleet: Callable[..., Fleet],
) -> None:
    """The first rank cancels while its thread waits for the other rank, which serves the request."""
    ranks = fleet(2)
    ranks.compute(PROMPT)
    cancelled = threading.Event()

    def act(rank: int, engine: CacheController) -> int:
        if rank:
            assert cancelled.wait(20)
        first, second = (engine.prefetch(name, PROMPT) for name in ("first", "second"))
        if rank:
            second._job._complete.wait(20)
        second.cancel()
        cancelled.set()
        first.result().release()
        with engine.prefetch("third", PROMPT).result() as lease:
            return lease.pages

    assert ranks.on_each_rank(act) == [16, 16]


def test_ranks_with_different_requests_are_lost_without_a_hang(
    fleet: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = fleet(2)
    ranks.compute(PROMPT)

    def act(rank: int, engine: CacheController) -> int:
        return engine.prefetch(f"of rank {rank}", PROMPT).result().pages

    assert ranks.on_each_rank(act) == [0, 0]
    assert ranks.fetch("later", PROMPT) == [0, 0]
    assert [1, 1] == [engine.stats()["ranks_lost"] for engine in ranks.engines]
    assert ranks.engines[0].explain("later").reason is Reason.RANKS_LOST
    loud = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(loud) == 2
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]


def test_one_request_id_with_different_prompts_is_no_consensus(fleet: Callable[..., Fleet]) -> None:
    """Each of two ranks has all pages of its own prompt. The numbers of pages are equal."""
    ranks = fleet(2)
    prompts = [PROMPT[:8], PROMPT[8:]]
    for engine, prompt in zip(ranks.engines, prompts, strict=True):
        compute(engine, prompt)

    def act(rank: int, engine: CacheController) -> int:
        with engine.prefetch("r", prompts[rank]).result() as lease:
            return lease.pages

    assert ranks.on_each_rank(act) == [0, 0]
    assert [1, 1] == [engine.stats()["ranks_lost"] for engine in ranks.engines]


@pytest.mark.parametrize(
    "request_id",
    ["", json.loads('"\\ud800"'), "a\n\0", "\U0001f600", "x" * 1_000_000],
    ids=["empty", "lone surrogate", "control characters", "emoji", "huge"],
)
def test_any_string_is_a_request_id(fleet: Callable[..., Fleet], request_id: str) -> None:
    ranks = fleet(2)
    ranks.compute(PROMPT)
    ranks.clear_l2()

    assert ranks.fetch(request_id, PROMPT) == [16, 16]

    told = str(ranks.engines[0].explain(request_id))
    assert told.isascii() or request_id == "\U0001f600"
    assert told.isprintable()
    assert len(told) < 1000


def test_an_interrupt_of_an_all_reduce_loses_the_ranks() -> None:
    """Otherwise the interrupted rank would take a later answer for the answer to this all-reduce."""

    class Interrupted(SingleRank):
        size = 2
        closed = False

        def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
            if channel is Channel.MATCH:
                return list(values)
            raise KeyboardInterrupt

        def close(self) -> None:
            self.closed = True

    ranks = Interrupted()
    with engine_on(None, cache_pools(), ranks=ranks) as engine:
        compute(engine, PROMPT)
        with pytest.raises(KeyboardInterrupt):
            engine.prefetch("r", PROMPT).result()
        assert ranks.closed
        with engine.prefetch("next", PROMPT).result() as lease:
            assert lease.pages == 0
        assert not leaked(engine)


def test_a_rank_that_is_gone_causes_no_hang(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet(2, timeout_s=0.2)
    ranks.compute(PROMPT)
    survivor = ranks.engines[0]

    for number in range(3):
        with survivor.prefetch(f"{number}", PROMPT).result() as lease:
            assert lease.pages == 0
    assert not leaked(survivor)


def test_any_error_of_an_all_reduce_loses_the_ranks_and_raises_nothing() -> None:
    class Broken(SingleRank):
        size = 2

        def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
            raise OSError("no network")

    with engine_on(None, cache_pools(), ranks=Broken()) as engine:
        compute(engine, PROMPT)
        with engine.prefetch("r", PROMPT).result() as lease:
            assert lease.pages == 0
        assert engine.explain("r").reason is Reason.RANKS_LOST
        assert not leaked(engine)


def test_several_ranks_have_one_prefetch_thread() -> None:
    with pytest.raises(ValueError, match="prefetch_threads must be 1, not 2"):
        CacheController(
            None,
            cache_pools(),
            ControllerSettings(prefetch_threads=2),
            ranks=ThreadRanks.of(2)[0],
        )


def test_one_rank_agrees_with_itself() -> None:
    consensus = Consensus(SingleRank(), Counters(), PoolSet(cache_pools()))

    agreed, _ = consensus.agree_prefix(Channel.MATCH, Topic.of("r"), [True, False, True, False])

    assert (2, None, False) == (agreed.pages, agreed.rank, agreed.lost)


def test_many_requests_in_one_order(fleet: Callable[..., Fleet]) -> None:
    """Ranks whose stores fail at different times take the same pages of every request."""
    ranks = fleet(2)
    ranks.compute(PROMPT)
    for rank, storage in enumerate(ranks.storages):
        calls = iter(range(10_000))

        def flap(answer: Callable[[], Any], rank: int = rank, calls: Any = calls) -> Any:
            if next(calls) % (5 + rank) == 0:
                raise StorageUnavailable("flapping")
            return answer()

        storage.hooks["batch_get"] = storage.hooks["batch_exists"] = flap
    pages: list[list[int]] = [[], []]

    def act(rank: int, engine: CacheController) -> int:
        for number in range(40):
            engine.cache.clear()
            prompt = [*PROMPT[: number % 16], hash_of(number)]
            with engine.prefetch(f"{number}", prompt).result() as lease:
                assert is_right(lease)
                pages[rank].append(lease.pages)
        return len(pages[rank])

    assert ranks.on_each_rank(act) == [40, 40]
    assert pages[0] == pages[1]
    assert any(pages[0])
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]
