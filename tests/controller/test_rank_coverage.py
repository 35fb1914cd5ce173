"""Coverage, slots and claims of a request, which are equal on two ranks that lack different pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import rank_losses
import rank_workers
from engines import (
    PROMPT,
    ThreadRanks,
    cache_pools,
    compute,
    content,
    delete_pages,
    engine_on,
    is_right,
    leaked,
    on_each_rank,
    optional_draft,
    windowed,
)
from rank_workers import connect_all, rank_processes
from stores import HookedStorage

from hicache_storage.controller import (
    CacheController,
    CachePool,
    Channel,
    Coverage,
    Lease,
    PartialHits,
)

TAKE: dict[str, Any] = {"partial_hits": PartialHits.TAKE_TARGET}


class CountingRanks(ThreadRanks):
    """Ranks that count their all-reduces."""

    calls = 0

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        self.calls += 1
        return super().all_reduce_min(channel, values)


class Pair:
    """Two ranks with their own stores and L2. The second rank has lost pages of its draft."""

    def __init__(self, stack: ExitStack, pools: Callable[[], list[CachePool]], **how: Any) -> None:
        self.ranks = CountingRanks.of(2)
        self.storages = [HookedStorage() for _ in self.ranks]
        self.engines = [
            stack.enter_context(engine_on(storage, pools(), ranks=ranks, **how))
            for storage, ranks in zip(self.storages, self.ranks, strict=True)
        ]

    def lose(self, rank: int, pages: Sequence[int], pool: str = "draft") -> None:
        """Delete some pages of a pool on one rank, in L2 and in L3."""
        engine = self.engines[rank]
        assert engine.drain(20)
        assert engine.cache.clear() == 0
        delete_pages(self.storages[rank], pool, [PROMPT[page] for page in pages])

    def both(self, act: Callable[[Lease, CacheController], Any], pages: int = 6) -> list[Any]:
        """Return the facts of a request's lease on each rank."""

        def run(rank: int) -> Any:
            with self.engines[rank].prefetch("r", PROMPT[:pages]).result() as lease:
                assert is_right(lease)
                return act(lease, self.engines[rank])

        return on_each_rank(run, 2, timeout_s=500)


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(pools: Callable[[], list[CachePool]] = optional_draft, **how: Any) -> Pair:
            made = Pair(stack, pools, **{**TAKE, **how})
            for engine in made.engines:
                compute(engine, PROMPT[:6])
            return made

        yield make


def test_a_draft_page_that_one_rank_lacks_is_missing_on_all(pair: Callable[..., Pair]) -> None:
    ranks = pair()
    ranks.lose(1, [2, 3])

    def facts(lease: Lease, _: CacheController) -> Any:
        return lease.pages, lease.verdict, lease.coverage, lease.missing("draft"), lease.indices

    coverage = [Coverage.BOTH] * 2 + [Coverage.TARGET_ONLY] * 2 + [Coverage.BOTH] * 2
    indices = [[0, 1, 2, 3, 4, 5], [0, 1, 4, 5]]
    assert [(6, Coverage.TARGET_ONLY, coverage, [2, 3], indices)] * 2 == ranks.both(facts)


def test_all_ranks_compute_it_again_and_then_all_have_it(pair: Callable[..., Pair]) -> None:
    """A rank that already has the page fills a spare slot, because others may be reading the page."""
    ranks = pair()
    ranks.lose(1, [2, 3])

    def draft(lease: Lease, engine: CacheController) -> Any:
        pool = engine.cache.pools[1]
        before = [lease.entries[page].slots[1] for page in (2, 3)]
        claimed = lease.claim("draft")
        assert claimed == lease.claim("draft")
        for page, slot in claimed.items():
            pool.host.page(slot).copy_from(content(pool, PROMPT[page]))
        lease.fill("draft", claimed)
        assert not lease.claim("draft")
        return list(claimed), before == list(claimed.values())

    assert [([2, 3], False), ([2, 3], True)] == ranks.both(draft)
    assert [Coverage.BOTH] * 2 == ranks.both(lambda lease, _: lease.verdict)
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]


def test_claims_that_were_not_filled_are_given_back(pair: Callable[..., Pair]) -> None:
    ranks = pair()
    ranks.lose(1, [2, 3])

    assert [[2, 3]] * 2 == ranks.both(lambda lease, _: list(lease.claim("draft")))
    assert [[2, 3]] * 2 == ranks.both(lambda lease, _: list(lease.claim("draft")))
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]


def test_a_page_that_is_being_filled_on_one_rank_is_claimed_on_none(
    pair: Callable[..., Pair],
) -> None:
    ranks = pair()
    ranks.lose(0, [2, 3])
    ranks.lose(1, [2, 3])

    def claim(lease: Lease, engine: CacheController) -> Any:
        if engine is ranks.engines[1]:
            engine.cache.claim(lease.entries[2], 0b10)  # as a load does
        claimed = list(lease.claim("draft"))
        if engine is ranks.engines[1]:
            engine.cache.unclaim(lease.entries[2], 0b10)
        return claimed

    assert [[3], [3]] == ranks.both(claim)
    assert not [leaked(engine) for engine in ranks.engines if leaked(engine)]


def test_a_page_that_one_rank_has_no_spare_slot_for_is_claimed_on_none(
    pair: Callable[..., Pair],
) -> None:
    ranks = pair()
    ranks.lose(1, [2, 3])

    def claim(lease: Lease, engine: CacheController) -> Any:
        taken = engine.cache.allocate([0b10] * (25 if engine is ranks.engines[0] else 1))
        claimed = list(lease.claim("draft"))
        engine.cache.free(taken)
        return claimed

    assert [[2], [2]] == ranks.both(claim)


def test_behind_the_prefix_too_the_coverage_is_the_same(pair: Callable[..., Pair]) -> None:
    """If a missing draft shortens the prefix, all ranks still report the coverage by the target."""
    ranks = pair(partial_hits=PartialHits.SHORTEN)
    ranks.lose(0, [5], "kv")
    ranks.lose(1, [2, 3])

    coverage = [Coverage.BOTH] * 2 + [Coverage.TARGET_ONLY] * 3 + [Coverage.NONE]
    assert [coverage] * 2 == ranks.both(lambda lease, _: lease.coverage)


def test_all_ranks_give_the_same_indices_of_a_window(pair: Callable[..., Pair]) -> None:
    """One rank has a further window, which ends before page 3."""
    ranks = pair(windowed)
    compute(ranks.engines[0], PROMPT[:3], ends=[3])

    indices = [[*range(6)], [*range(6)], [4, 5]]
    assert [indices] * 2 == ranks.both(lambda lease, _: lease.indices)


def test_a_rank_without_the_draft_takes_part_in_its_claims() -> None:
    """Only the last of two pipeline stages has the draft."""
    with ExitStack() as stack:
        ranks = ThreadRanks.of(2)
        engines = [
            stack.enter_context(engine_on(HookedStorage(), pools, ranks=rank, **TAKE))
            for rank, pools in zip(ranks, (optional_draft()[:1], optional_draft()), strict=True)
        ]
        compute(engines[0], PROMPT[:4])
        compute(engines[1], PROMPT[:2], without=["draft"])
        compute(engines[1], PROMPT[2:4])

        def act(rank: int) -> Any:
            with engines[rank].prefetch("r", PROMPT[:4]).result() as lease:
                claimed = lease.claim("draft")
                lease.fill("draft", [])
                with pytest.raises(ValueError, match="no pool 'drft'"):
                    lease.claim("drft")
                return lease.coverage, lease.missing("draft"), len(claimed)

        coverage = [Coverage.TARGET_ONLY] * 2 + [Coverage.BOTH] * 2
        assert [(coverage, [0, 1], 0), (coverage, [0, 1], 2)] == on_each_rank(act, 2, timeout_s=500)


def test_ranks_with_windows_of_different_lengths_are_lost() -> None:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                engine_on(HookedStorage(), windowed(window_pages=pages), ranks=rank)
            )
            for pages, rank in zip((2, 3), ThreadRanks.of(2), strict=True)
        ]
        for engine in engines:
            compute(engine, PROMPT[:4])

        def act(rank: int) -> int:
            with engines[rank].prefetch("r", PROMPT[:4]).result() as lease:
                return lease.pages

        assert [0, 0] == on_each_rank(act, 2, timeout_s=500)
        assert [1, 1] == [engine.stats()["ranks_lost"] for engine in engines]


@pytest.mark.parametrize(("pools", "at_first"), [(cache_pools, 1), (optional_draft, 2)])
def test_a_request_takes_two_agreements_and_a_claim_one(
    pair: Callable[..., Pair], pools: Callable[[], list[CachePool]], at_first: int
) -> None:
    """First the ranks agree on their partial pools: an all-reduce for each, and one to end."""
    ranks = pair(pools)
    ranks.lose(1, [2, 3])
    ranks.both(lambda lease, _: lease.pages)
    assert [2 + at_first] * 2 == [rank.calls for rank in ranks.ranks]

    ranks.both(lambda lease, _: lease.pages)
    assert [4 + at_first] * 2 == [rank.calls for rank in ranks.ranks]

    ranks.both(lambda lease, _: lease.claim("draft"))
    claims = 1 if pools is optional_draft else 0
    assert [6 + at_first + claims] * 2 == [rank.calls for rank in ranks.ranks]


@pytest.mark.no_cover
def test_four_ranks_that_lose_drafts_get_equal_leases_of_a_thousand_requests() -> None:
    ranks = ThreadRanks.of(4, timeout_s=120)

    facts = on_each_rank(
        lambda rank: rank_losses.serve_with_losses(rank, ranks[rank], 1000), 4, timeout_s=500
    )

    assert facts[0]
    assert [facts[0]] * 4 == facts
    covered = [each for each in facts[0] if len(each) == 5]
    drafted = [each for each in facts[0] if len(each) == 2]
    assert len(covered) == 1000
    assert {each[1] for each in covered} == {"both", "target_only", "none"}
    assert any(claimed for claimed, _ in drafted)


def test_processes_get_equal_leases(tmp_path: Path) -> None:
    """The ranks use torch.distributed, as engines do."""
    with rank_processes(2) as processes:
        connect_all(processes, tmp_path, timeout_s=120)
        answers = [process.submit(rank_workers.serve_with_losses, 60) for process in processes]
        facts = [answer.result() for answer in answers]

    assert facts[0]
    assert facts[0] == facts[1]
