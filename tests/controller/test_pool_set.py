"""The pools that a prefix needs at each page, compared with a naive implementation."""

from __future__ import annotations

import pytest
from engines import DRAFT_SHAPE, cache_pool, windowed
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.controller import CachePool
from hicache_storage.controller.pool_coverage import Coverage, page_coverage, prefix_coverage
from hicache_storage.controller.pools import PoolSet, pool_numbers
from hicache_storage.page_store.lookup import HitPolicy, longest

Filled = list[int]

_POOLS = {
    (name, policy, required, window): cache_pool(
        name,
        DRAFT_SHAPE,
        1,
        hit_policy=policy,
        required=required,
        window_pages=window,
    )
    for name in "abcd"
    for policy in HitPolicy
    for required in (True, False)
    for window in (1, 2, 3)
}


@st.composite
def caches(draw: st.DrawFn) -> tuple[PoolSet, Filled]:
    """Draw a target, up to three other pools of any kind, and pages with gaps."""
    pools = [_POOLS["a", HitPolicy.ALL_PAGES, True, 1]]
    for name in "bcd"[: draw(st.integers(0, 3))]:
        policy, required = draw(st.sampled_from(HitPolicy)), draw(st.booleans())
        pools.append(_POOLS[name, policy, required, draw(st.integers(1, 3))])
    all_pools = (1 << len(pools)) - 1
    page = st.one_of(st.just(all_pools), st.integers(0, all_pools))
    return PoolSet(pools), draw(st.lists(page, max_size=9))


def is_needed(pool: CachePool, page: int, length: int) -> bool:
    return pool.hit_policy is HitPolicy.ALL_PAGES or page >= length - pool.window_pages


def naive_lengths(pools: PoolSet, filled: Filled, among: int) -> list[int]:
    """Return every length at which each chosen pool has every page that it needs."""
    return [
        length
        for length in range(len(filled) + 1)
        if all(
            filled[page] >> number & 1
            for number in pool_numbers(among)
            for page in range(length)
            if is_needed(pools.pools[number], page, length)
        )
    ]


@settings(deadline=None)  # The machine may be busy.
@given(caches())
def test_usable_lengths_are_those_where_nothing_is_missing(cache: tuple[PoolSet, Filled]) -> None:
    pools, filled = cache

    for among in (pools.required, pools.all_pools):
        usable = pools.usable(filled, among)

        assert naive_lengths(pools, filled, among) == [n for n, ok in enumerate(usable) if ok]
        assert naive_lengths(pools, filled, among)[-1] == longest(usable)


@settings(deadline=None)  # The machine may be busy.
@given(caches())
def test_each_page_of_a_prefix_is_covered_as_far_as_its_pools_go(
    cache: tuple[PoolSet, Filled],
) -> None:
    pools, filled = cache
    target = longest(pools.usable(filled, pools.required))
    both = longest(pools.usable(filled, pools.all_pools))

    ends = {"target_pages": target, "asked_pages": len(filled)}
    taken = page_coverage(pools.needed, filled, target, **ends)
    shortened = page_coverage(pools.needed, filled, both, **ends)

    whole = [
        all(
            filled[page] >> number & 1
            for number, pool in enumerate(pools.pools)
            if is_needed(pool, page, target)
        )
        for page in range(target)
    ]
    assert [Coverage.BOTH if ok else Coverage.TARGET_ONLY for ok in whole] == taken[:target]
    assert [Coverage.NONE] * (len(filled) - target) == taken[target:]
    assert [Coverage.BOTH] * both == shortened[:both]
    assert [Coverage.TARGET_ONLY] * (target - both) == shortened[both:target]


@settings(deadline=None)  # The machine may be busy.
@given(caches())
def test_a_prefix_ends_at_its_first_gap(cache: tuple[PoolSet, Filled]) -> None:
    """The gap is in the first pool, in lookup order, that shortens the prefix to its final length."""
    pools, filled = cache
    gap = pools.first_gap(filled, pools.all_pools)

    if gap is None:
        assert pools.usable(filled, pools.all_pools)[-1]
    else:
        page, number = gap
        bit = 1 << number
        asked_before = pools.lookup_order(pools.all_pools)
        so_far = sum(1 << pool for pool in asked_before[: asked_before.index(number)])
        length = longest(pools.usable(filled, pools.all_pools))
        assert not filled[page] & bit
        assert length == longest(pools.usable(filled, so_far | bit))
        assert length < longest(pools.usable(filled, so_far))


@settings(deadline=None)  # The machine may be busy.
@given(caches(), st.lists(st.integers(0, 9), max_size=3))
def test_windows_in_front_of_every_end_get_slots(
    cache: tuple[PoolSet, Filled], ends: list[int]
) -> None:
    pools, filled = cache
    pages = len(filled)

    needed = pools.needed_at(pages, ends)

    for page in range(pages):
        for number, pool in enumerate(pools.pools):
            wanted = pool.hit_policy is HitPolicy.ALL_PAGES or any(
                end - pool.window_pages <= page < end for end in ends
            )
            assert wanted == bool(needed[page] >> number & 1)


def test_the_verdict_of_a_prefix_is_that_of_its_worst_page() -> None:
    both, target_only = Coverage.BOTH, Coverage.TARGET_ONLY

    assert prefix_coverage([]) is Coverage.NONE
    assert prefix_coverage([both, both]) is both
    assert prefix_coverage([both, target_only]) is target_only


def test_a_pool_is_found_by_its_name() -> None:
    pools = PoolSet(windowed())

    assert pools.number("swa") == 2
    with pytest.raises(ValueError, match="no pool 'mamba'; this cache has 'kv', 'draft', 'swa'"):
        pools.number("mamba")


def test_a_cache_has_a_required_pool_of_all_pages() -> None:
    with pytest.raises(ValueError, match="that of the target"):
        PoolSet([cache_pool("draft", required=False)])
