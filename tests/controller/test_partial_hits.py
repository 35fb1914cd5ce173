"""Pages of which the store has the target, but not the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from engines import (
    DRAFT_SHAPE,
    PROMPT,
    cache_pool,
    compute,
    content,
    delete_pages,
    engine_on,
    free_slots,
    is_right,
    leaked,
    optional_draft,
    page_store,
    recompute,
    until,
)
from hicache_backends.memory import MemoryStorage
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import Gate, HookedStorage, failing

from hicache_storage.controller import CacheController, CachePool, Coverage, PartialHits, Reason
from hicache_storage.controller.pools import PoolSet, pool_numbers
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page_store.lookup import HitPolicy
from hicache_storage.storage import HiCacheStorage

BOTH, TARGET_ONLY, NONE = Coverage.BOTH, Coverage.TARGET_ONLY, Coverage.NONE


@pytest.fixture
def storage() -> HookedStorage:
    """Return a storage with the target of 12 pages, and the draft of all these except 5 and 6."""
    storage = HookedStorage()
    with engine_on(storage, optional_draft()) as first:
        compute(first, PROMPT[:12])
        assert first.drain(20)
    delete_pages(storage, "draft", PROMPT[5:7])
    return storage


def stored(storage: HookedStorage, pool: str, hashes: Iterable[str]) -> list[bool]:
    there: set[str] = set()
    for known in storage.inner.spaces():
        if known.pool == pool:
            there |= {page.page_hash for page in storage.inner.scan(known)}
    return [page_hash in there for page_hash in hashes]


def hook_reads(storage: HookedStorage, pool: str, hook: Callable[[Callable[[], Any]], Any]) -> None:
    """Set a hook for the reads of one pool."""
    read = storage.inner.batch_get

    def hooked(space: Any, hashes: Any, pages: Any) -> list[bool]:
        answers: list[bool] = (
            hook(lambda: read(space, hashes, pages))
            if space.pool == pool
            else read(space, hashes, pages)
        )
        return answers

    vars(storage.inner)["batch_get"] = hooked


class TestShorten:
    def test_the_prefix_ends_where_the_draft_ends_and_coverage_shows_the_target(
        self, storage: HookedStorage
    ) -> None:
        with engine_on(storage, optional_draft()) as engine:
            with engine.prefetch("r", PROMPT).result() as lease:
                assert (lease.pages, lease.verdict) == (5, BOTH)
                assert [BOTH] * 5 + [TARGET_ONLY] * 7 + [NONE] * 4 == lease.coverage
                assert is_right(lease)
            assert not leaked(engine)

    def test_the_missing_pages_computed_again_are_whole(self, storage: HookedStorage) -> None:
        with engine_on(storage, optional_draft()) as engine:
            compute(engine, PROMPT[5:7])
            with engine.prefetch("r", PROMPT).result() as lease:
                assert (lease.pages, lease.verdict) == (12, BOTH)
                assert is_right(lease)
            assert engine.drain(20)
        assert all(stored(storage, "draft", PROMPT[:12]))


class TestTakeTarget:
    def taking(self, storage: HookedStorage, **settings: Any) -> Any:
        return engine_on(
            storage, optional_draft(), partial_hits=PartialHits.TAKE_TARGET, **settings
        )

    def test_the_target_is_taken_and_missing_names_the_drafts_gap(
        self, storage: HookedStorage
    ) -> None:
        with self.taking(storage) as engine:
            with engine.prefetch("r", PROMPT).result() as lease:
                assert (lease.pages, lease.verdict) == (12, TARGET_ONLY)
                assert [5, 6] == lease.missing("draft")
                assert [BOTH] * 5 + [TARGET_ONLY] * 2 + [BOTH] * 5 + [NONE] * 4 == lease.coverage
                assert not lease.missing("kv")
                assert is_right(lease)
            assert engine.stats()["target_only_pages"] == 2
            assert not leaked(engine)

    def test_slots_name_filled_slots_only(self, storage: HookedStorage) -> None:
        with self.taking(storage) as engine, engine.prefetch("r", PROMPT).result() as lease:
            target, draft = lease.indices
            assert list(range(12)) == target
            assert [0, 1, 2, 3, 4, 7, 8, 9, 10, 11] == draft
            assert [12, 10] == [len(slots) for slots in lease.slots]

    def test_one_read_for_both_pools_of_a_batch(self, storage: HookedStorage) -> None:
        """SGLang merges the reads of several pools only if there is no draft pool."""
        with self.taking(storage, batch_pages=16) as engine:
            attached = engine._attached
            assert attached is not None
            loads: list[int] = []
            load = attached.store.load

            def counted(transfers: Any, **more: Any) -> Any:
                loads.append(len(transfers))
                return load(transfers, **more)

            vars(attached.store)["load"] = counted
            engine.prefetch("r", PROMPT).result().release()
        assert loads == [2]

    def test_the_draft_computes_its_pages_again_and_all_is_whole(
        self, storage: HookedStorage
    ) -> None:
        with self.taking(storage) as engine:
            with engine.prefetch("r", PROMPT).result() as lease:
                assert [5, 6] == recompute(lease, "draft")
            with engine.prefetch("again", PROMPT).result() as lease:
                assert (lease.pages, lease.verdict, lease.l3_pages) == (12, BOTH, 0)
                assert is_right(lease)
            assert engine.drain(20)
            assert not leaked(engine)
        assert all(stored(storage, "draft", PROMPT[:12]))

    def test_a_gap_is_one_requests_to_fill(self, storage: HookedStorage) -> None:
        with self.taking(storage) as engine:
            first = engine.prefetch("first", PROMPT).result()
            second = engine.prefetch("second", PROMPT).result()

            assert [5, 6] == list(first.claim("draft"))
            assert not second.claim("draft")
            first.release()
            assert [5, 6] == list(second.claim("draft"))

            second.release()
            assert not leaked(engine)

    def test_a_page_that_is_committed_leaves_a_claimed_gap_to_its_claimer(
        self, storage: HookedStorage
    ) -> None:
        with self.taking(storage) as engine:
            with engine.prefetch("r", PROMPT).result() as lease:
                claimed = lease.claim("draft")
                compute(engine, PROMPT[5:7])
                assert claimed == lease.claim("draft")
                assert [5, 6] == recompute(lease, "draft")
            with engine.prefetch("again", PROMPT).result() as lease:
                assert lease.verdict is BOTH
                assert is_right(lease)
                assert list(claimed.values()) == lease.slots[1][5:7]
            assert engine.drain(20)
            assert not leaked(engine)

    def test_a_page_that_was_not_claimed_cannot_be_filled(self, storage: HookedStorage) -> None:
        with self.taking(storage) as engine, engine.prefetch("r", PROMPT).result() as lease:
            lease.claim("draft")

            for pages in ([4], [5, 4]):
                with pytest.raises(ValueError, match="page 4 of pool 'draft' is not claimed"):
                    lease.fill("draft", pages)
            lease.release()
            with pytest.raises(ValueError, match="page 5 of pool 'draft' is not claimed"):
                lease.fill("draft", [5])
            assert not lease.claim("draft")

    def test_a_draft_that_l3_has_by_now_is_loaded_into_a_page_that_l2_has(
        self, storage: HookedStorage
    ) -> None:
        with self.taking(storage) as engine, self.taking(storage) as other:
            engine.prefetch("r", PROMPT).result().release()
            compute(other, PROMPT[5:7])
            assert other.drain(20)

            with engine.prefetch("again", PROMPT).result() as lease:
                assert ([5, 6], BOTH) == (lease.loaded, lease.verdict)
                assert is_right(lease)
            assert not leaked(engine)

    def test_a_committed_page_fills_the_gap_of_the_page_that_is_there(
        self, storage: HookedStorage
    ) -> None:
        with self.taking(storage) as engine:
            engine.prefetch("r", PROMPT).result().release()
            compute(engine, PROMPT[5:7])

            with engine.prefetch("again", PROMPT).result() as lease:
                assert lease.verdict is BOTH
                assert is_right(lease)
            assert engine.drain(20)
            assert not leaked(engine)

    def test_a_store_without_drafts_leaves_the_target(self, storage: HookedStorage) -> None:
        """The draft's reads fail after the lookup found its pages."""
        with self.taking(storage) as engine:
            hook_reads(storage, "draft", failing(StorageUnavailable("down")))
            with engine.prefetch("r", PROMPT[:4]).result() as lease:
                assert [0, 1, 2, 3] == lease.missing("draft")
                assert lease.pages == 4
                assert is_right(lease)
            assert not leaked(engine)

    def test_a_hung_draft_read_gives_its_slots_back_and_the_target_is_used(
        self, storage: HookedStorage
    ) -> None:
        gate = Gate()
        with self.taking(storage, timeout_s=1.0) as engine:
            delete_pages(storage, "draft", PROMPT[:1])
            hook_reads(storage, "draft", gate)
            with engine.prefetch("r", PROMPT[:4]).result() as lease:
                assert [0, 1, 2, 3] == lease.missing("draft")
                assert [0, 1, 2, 3] == list(lease.claim("draft"))
                assert is_right(lease)
            gate.open()
            until(lambda: not leaked(engine))
            assert [32, 32] == free_slots(engine)

    def test_a_read_that_is_not_made_gives_its_claims_back(self, storage: HookedStorage) -> None:
        """L2 has only the target of pages 5 and 6. L3 has their draft, but too much is in flight."""
        with (
            self.taking(storage, timeout_s=1, inflight_nbytes=1) as engine,
            self.taking(storage) as other,
        ):
            engine.prefetch("r", PROMPT).result().release()
            compute(other, PROMPT[5:7])
            assert other.drain(20)
            attached = engine._attached
            assert attached is not None
            until(lambda: not attached.in_flight.nbytes)
            assert attached.in_flight.acquire(1, 0)
            with engine.prefetch("refused", PROMPT).result() as lease:
                assert [5, 6] == lease.missing("draft")
                assert [5, 6] == list(lease.claim("draft"))
            attached.in_flight.release(1)

            with engine.prefetch("again", PROMPT).result() as lease:
                assert ([5, 6], BOTH) == (lease.loaded, lease.verdict)
            assert not leaked(engine)

    def test_a_read_that_raises_gives_everything_back(self, storage: HookedStorage) -> None:
        """A defect of the page store costs one request its pages, but leaks no slots and no thread."""
        with self.taking(storage) as engine:
            attached = engine._attached
            assert attached is not None

            def broken(*_: Any, **__: Any) -> Any:
                raise ValueError("a bug")

            vars(attached.store)["load"] = broken
            with engine.prefetch("r", PROMPT).result() as lease:
                assert lease.pages == 0
            assert engine.explain("r").reason is Reason.INTERNAL_ERROR
            assert not leaked(engine)
            assert not attached.in_flight.nbytes

            del vars(attached.store)["load"]
            assert engine.prefetch("again", PROMPT).result().pages == 12

    def test_slots_of_a_hung_read_are_free_though_the_page_came_another_way(
        self, storage: HookedStorage
    ) -> None:
        gate = Gate()
        with self.taking(storage, timeout_s=1) as engine:
            hook_reads(storage, "draft", gate)
            prefetch = engine.prefetch("r", PROMPT[:4])
            assert gate.entered.wait(20)
            compute(engine, PROMPT[:4])
            with prefetch.result() as lease:
                assert lease.verdict is BOTH
                assert is_right(lease)
            assert [28, 28] == free_slots(engine)
            assert not leaked(engine)
            gate.open()


class TestCommit:
    def test_a_draft_that_did_not_run_is_not_there(self) -> None:
        storage = HookedStorage()
        with engine_on(storage, optional_draft(), partial_hits=PartialHits.TAKE_TARGET) as engine:
            compute(engine, PROMPT[:4], without=["draft"])
            assert engine.drain(20)
            with engine.prefetch("r", PROMPT[:4]).result() as lease:
                assert (lease.pages, lease.verdict) == (4, TARGET_ONLY)
                assert [0, 1, 2, 3] == lease.missing("draft")
        assert stored(storage, "kv", PROMPT[:4]) == [True] * 4
        assert stored(storage, "draft", PROMPT[:4]) == [False] * 4

    def test_the_target_must_have_run(self) -> None:
        with engine_on(HookedStorage(), optional_draft()) as engine:
            reservation = engine.reserve(PROMPT)
            with pytest.raises(ValueError, match="required pool"):
                engine.commit(reservation, without=["kv"])
            reservation.abandon()
            assert not leaked(engine)


class TestWriting:
    def test_no_draft_page_is_written_before_its_target(self) -> None:
        """After any failure a reader finds no draft without its target."""
        storage = HookedStorage()
        order: list[str] = []
        write = storage.inner.batch_set

        def noted(space: Any, hashes: Any, pages: Any) -> list[bool]:
            order.append(space.pool)
            return write(space, hashes, pages)

        vars(storage.inner)["batch_set"] = noted
        with engine_on(storage, optional_draft()) as engine:
            compute(engine, PROMPT[:4])
            assert engine.drain(20)
            assert order == ["kv", "draft"]
            assert engine.stats()["written_pages"] == 4

    def test_the_draft_of_one_batch_goes_with_the_target_of_the_next(self) -> None:
        storage = HookedStorage()
        with engine_on(storage, optional_draft()) as engine:
            attached = engine._attached
            assert attached is not None
            saves: list[list[str]] = []
            save = attached.store.save

            def counted(transfers: Any) -> Any:
                saves.append([transfer.space.pool for transfer in transfers])
                return save(transfers)

            vars(attached.store)["save"] = counted
            compute(engine, PROMPT[:12])
            assert engine.drain(20)
        assert saves == [["kv"], ["kv", "draft"], ["kv", "draft"], ["draft"]]

    @pytest.mark.parametrize("refused", ["kv", "draft"])
    def test_a_group_that_fails_in_part_leaves_a_correct_prefix(self, refused: str) -> None:
        storage = HookedStorage()
        write = storage.inner.batch_set

        def refuse(space: Any, hashes: Any, pages: Any) -> list[bool]:
            if space.pool != refused:
                return write(space, hashes, pages)
            kept = [n for n, page_hash in enumerate(hashes) if page_hash != PROMPT[2]]
            write(space, [hashes[n] for n in kept], [pages[n] for n in kept])
            return [page_hash != PROMPT[2] for page_hash in hashes]

        vars(storage.inner)["batch_set"] = refuse
        with engine_on(storage, optional_draft()) as engine:
            compute(engine, PROMPT[:4])
            assert not engine.drain(20)
            assert (engine.stats()["written_pages"], engine.stats()["unwritten_pages"]) == (3, 1)

        drafts = [True, True, False, True]
        assert stored(storage, "draft", PROMPT[:4]) == drafts
        assert stored(storage, "kv", PROMPT[:4]) == (drafts if refused == "kv" else [True] * 4)
        with (
            engine_on(storage, optional_draft()) as reader,
            reader.prefetch("r", PROMPT[:4]).result() as lease,
        ):
            assert lease.pages == 2
            assert is_right(lease)

    def test_a_rank_that_does_not_write_the_target_writes_its_draft(self) -> None:
        storage = HookedStorage()
        target, draft = optional_draft()
        reader = type(target)(space=target.space, host=target.host, writes=False)
        with engine_on(storage, [reader, draft]) as engine:
            compute(engine, PROMPT[:4])
            assert engine.drain(20)
            assert engine.stats()["written_pages"] == 4
        assert stored(storage, "kv", PROMPT[:4]) == [False] * 4
        assert stored(storage, "draft", PROMPT[:4]) == [True] * 4


# Leases of arbitrary pools and missing pages, compared with a naive reading of the policies.


@dataclass(frozen=True)
class CacheState:
    """The pools, and for each page the pools that L2 and L3 have, as bits."""

    pools: list[CachePool]
    l2: list[int]
    l3: list[int]
    partial_hits: PartialHits


@st.composite
def any_pool(draw: st.DrawFn, name: str) -> CachePool:
    return cache_pool(
        name,
        DRAFT_SHAPE,
        12,
        hit_policy=draw(st.sampled_from(HitPolicy)),
        required=draw(st.booleans()),
        window_pages=draw(st.integers(1, 3)),
    )


@st.composite
def cache_states(draw: st.DrawFn) -> CacheState:
    names = ("draft", "swa", "mamba")[: draw(st.integers(0, 3))]
    pools = [cache_pool("kv", DRAFT_SHAPE, 12), *(draw(any_pool(name)) for name in names)]
    pool_set = PoolSet(pools)
    all_pools = pool_set.all_pools
    hit_pools = pool_set.required & pool_set.all_pages
    some = st.one_of(st.just(all_pools), st.integers(0, all_pools))
    l2_page = st.one_of(st.just(0), some.map(lambda bits: bits | hit_pools))
    pages = draw(st.integers(0, 8))
    l2 = draw(st.lists(l2_page, min_size=pages, max_size=pages))
    l3 = draw(st.lists(some, min_size=pages, max_size=pages))
    return CacheState(pools, l2, l3, draw(st.sampled_from(PartialHits)))


def fill_storage(storage: HiCacheStorage, state: CacheState) -> None:
    """Fill L3 through a page store, so that its pages have frames."""
    with page_store(storage) as store:
        for number, pool in enumerate(state.pools):
            store.open_space(pool.space)
            for page, bits in enumerate(state.l3):
                if bits >> number & 1:
                    slot = (pool.host.allocate(1) or [])[0]
                    pool.host.page(slot).copy_from(content(pool, PROMPT[page]))
                    assert store.save(pool.transfers([PROMPT[page]], [slot])).arrived() == 1
                    pool.host.page(slot).copy_from(bytes(pool.space.page_nbytes))
                    pool.host.free([slot])


def fill_cache(engine: CacheController, state: CacheState) -> None:
    """Fill L2."""
    cache = engine.cache
    for page, bits in enumerate(state.l2):
        if bits:
            (slots,) = cache.allocate([bits | cache.pool_set.all_pages])
            for number in pool_numbers(bits):
                slot = slots[number]
                assert slot is not None
                pool = cache.pools[number]
                pool.host.page(slot).copy_from(content(pool, PROMPT[page]))
            entry, left = cache.insert(PROMPT[page], slots, filled=bits)
            cache.free([left])
            cache.unpin([entry])


def lacks(pools: list[CachePool], among: set[int], there: list[int], length: int) -> set[int]:
    """Return the pages of a prefix that some pool of `among` needs and lacks."""
    return {
        page
        for page in range(length)
        for number in among
        if pools[number].hit_policy is HitPolicy.ALL_PAGES
        or page >= length - pools[number].window_pages
        if not there[page] >> number & 1
    }


@settings(deadline=None, max_examples=150)
@given(cache_states())
def test_a_lease_is_the_longest_prefix_that_l2_and_l3_have_together(state: CacheState) -> None:
    storage = MemoryStorage()
    fill_storage(storage, state)
    pages = len(state.l2)
    there = [l2 | l3 for l2, l3 in zip(state.l2, state.l3, strict=True)]
    all_pools = set(range(len(state.pools)))
    required = {number for number in all_pools if state.pools[number].required}
    hit_pools = all_pools if state.partial_hits is PartialHits.SHORTEN else required
    usable = [n for n in range(pages + 1) if not lacks(state.pools, hit_pools, there, n)]
    target_only = lacks(state.pools, all_pools, there, usable[-1])

    with engine_on(storage, state.pools, partial_hits=state.partial_hits, batch_pages=3) as engine:
        fill_cache(engine, state)
        with engine.prefetch("r", PROMPT[:pages]).result() as lease:
            assert usable[-1] == lease.pages
            assert is_right(lease)
            told = {page for page, cover in enumerate(lease.coverage) if cover is Coverage.BOTH}
            assert set(range(lease.pages)) - target_only == told
            missing = {page for pool in state.pools for page in lease.missing(pool.space.pool)}
            assert missing == target_only
        explained = engine.explain("r")
        assert (explained.reason is None) == (usable[-1] == pages)
        assert engine.drain(20)
        assert not leaked(engine)
