"""Leases of any pools with any pages missing, compared with a naive reading of the policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engines import (
    DRAFT_SHAPE,
    PROMPT,
    cache_pool,
    content,
    engine_on,
    is_right,
    leaked,
    page_store,
)
from hicache_backends.memory import MemoryStorage
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.controller import Coverage, PartialHits
from hicache_storage.controller.pools import PoolSet, pool_numbers
from hicache_storage.page_store.lookup import HitPolicy

if TYPE_CHECKING:
    from hicache_storage.controller import CacheController, CachePool
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True)
class CacheState:
    """Pools, and the pools that L2 and L3 have of each page, as bits."""

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
    """Fill L3 through a page store, so that pages have frames."""
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
