"""Any pools, anything missing anywhere: a lease is what the plainest reading of the policies says."""

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
from hicache_storage.controller.pool_set import PoolSet, numbers
from hicache_storage.page_store.lookup import HitPolicy

if TYPE_CHECKING:
    from hicache_storage.controller import CacheController, CachePool
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True)
class Scene:
    """Pools, and which of them L2 and L3 have of each page, as bits."""

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
def scenes(draw: st.DrawFn) -> Scene:
    names = ("draft", "swa", "mamba")[: draw(st.integers(0, 3))]
    pools = [cache_pool("kv", DRAFT_SHAPE, 12), *(draw(any_pool(name)) for name in names)]
    pool_set = PoolSet(pools)
    everything = pool_set.everything
    vital = pool_set.required & pool_set.every_page
    some = st.one_of(st.just(everything), st.integers(0, everything))
    l2_page = st.one_of(st.just(0), some.map(lambda bits: bits | vital))
    pages = draw(st.integers(0, 8))
    l2 = draw(st.lists(l2_page, min_size=pages, max_size=pages))
    l3 = draw(st.lists(some, min_size=pages, max_size=pages))
    return Scene(pools, l2, l3, draw(st.sampled_from(PartialHits)))


def fill_storage(storage: HiCacheStorage, scene: Scene) -> None:
    """L3 as the scene says, through a page store: pages have frames."""
    with page_store(storage) as store:
        for number, pool in enumerate(scene.pools):
            store.open_space(pool.space)
            for page, bits in enumerate(scene.l3):
                if bits >> number & 1:
                    slot = (pool.host.allocate(1) or [])[0]
                    pool.host.page(slot).copy_from(content(pool, PROMPT[page]))
                    assert store.save(pool.transfers([PROMPT[page]], [slot])).arrived() == 1
                    pool.host.page(slot).copy_from(bytes(pool.space.page_nbytes))
                    pool.host.free([slot])


def fill_cache(engine: CacheController, scene: Scene) -> None:
    """L2 as the scene says."""
    cache = engine.cache
    for page, bits in enumerate(scene.l2):
        if bits:
            (slots,) = cache.allocate([bits | cache.pool_set.every_page])
            for number in numbers(bits):
                slot = slots[number]
                assert slot is not None
                pool = cache.pools[number]
                pool.host.page(slot).copy_from(content(pool, PROMPT[page]))
            entry, left = cache.insert(PROMPT[page], slots, filled=bits)
            cache.free([left])
            cache.unpin([entry])


def lacks(pools: list[CachePool], among: set[int], there: list[int], length: int) -> set[int]:
    """The pages of a prefix that some pool of `among` needs and lacks."""
    return {
        page
        for page in range(length)
        for number in among
        if pools[number].hit_policy is HitPolicy.ALL_PAGES
        or page >= length - pools[number].window_pages
        if not there[page] >> number & 1
    }


@settings(deadline=None, max_examples=150)
@given(scenes())
def test_a_lease_is_the_longest_prefix_that_l2_and_l3_have_together(scene: Scene) -> None:
    storage = MemoryStorage()
    fill_storage(storage, scene)
    pages = len(scene.l2)
    there = [l2 | l3 for l2, l3 in zip(scene.l2, scene.l3, strict=True)]
    everything = set(range(len(scene.pools)))
    required = {number for number in everything if scene.pools[number].required}
    vital = everything if scene.partial_hits is PartialHits.SHORTEN else required
    usable = [n for n in range(pages + 1) if not lacks(scene.pools, vital, there, n)]
    target_only = lacks(scene.pools, everything, there, usable[-1])

    with engine_on(storage, scene.pools, partial_hits=scene.partial_hits, batch_pages=3) as engine:
        fill_cache(engine, scene)
        with engine.prefetch("r", PROMPT[:pages]).result() as lease:
            assert usable[-1] == lease.pages
            assert is_right(lease)
            told = {page for page, cover in enumerate(lease.coverage) if cover is Coverage.BOTH}
            assert set(range(lease.pages)) - target_only == told
            missing = {page for pool in scene.pools for page in lease.missing(pool.space.pool)}
            assert missing == target_only
        explained = engine.explain("r")
        assert (explained.reason is None) == (usable[-1] == pages)
        assert engine.drain(20)
        assert not leaked(engine)
