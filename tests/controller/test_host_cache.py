from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from engines import cache_pools
from pages import hash_of

from hicache_storage.controller.host_cache import Entry, HostCache
from hicache_storage.controller.pools import CachePool

A, B, C, D = (hash_of(number) for number in range(4))


def held(cache: HostCache, *hashes: str) -> list[Entry]:
    """Pages put into L2, still pinned."""
    slots = cache.allocate(len(hashes))
    return [cache.insert(h, group, stored=True) for h, group in zip(hashes, slots, strict=True)]


def put(cache: HostCache, *hashes: str) -> None:
    cache.unpin(held(cache, *hashes))


def has(cache: HostCache, page_hash: str) -> bool:
    found = cache.acquire([page_hash])
    cache.unpin(found)
    return bool(found)


class TestLookup:
    def test_acquire_gives_the_leading_run(self) -> None:
        cache = HostCache(cache_pools(4))
        put(cache, A, B, D)

        assert [A, B] == [entry.page_hash for entry in cache.acquire([A, B, C, D])]

    def test_a_missing_run_ends_where_l2_has_a_page(self) -> None:
        cache = HostCache(cache_pools(4))
        put(cache, C)

        assert cache.missing_run([A, B, C, D]) == 2
        assert cache.missing_run([A, B]) == 2
        assert cache.missing_run([C]) == 0

    def test_a_page_that_is_there_already_keeps_its_slots(self) -> None:
        pools = cache_pools(4)
        cache = HostCache(pools)
        (first,) = held(cache, A)

        (second,) = held(cache, A)

        assert first is second
        assert [3, 3] == [pool.host.free_slots for pool in pools]


class TestEviction:
    def test_the_page_idle_longest_goes_first(self) -> None:
        cache = HostCache(cache_pools(2))
        put(cache, A)
        put(cache, B)
        assert has(cache, A)

        put(cache, C)

        assert [True, False, True] == [has(cache, h) for h in (A, B, C)]
        assert cache.evicted_pages == 1

    def test_a_prefix_loses_its_tail_before_its_head(self) -> None:
        cache = HostCache(cache_pools(3))
        put(cache, A, B, C)

        put(cache, D)

        assert [True, True, False] == [has(cache, h) for h in (A, B, C)]

    def test_a_pinned_page_stays(self) -> None:
        cache = HostCache(cache_pools(2))
        held(cache, A)
        put(cache, B)

        put(cache, C)

        assert [True, False, True] == [has(cache, h) for h in (A, B, C)]

    def test_a_page_pinned_twice_is_idle_when_both_let_go(self) -> None:
        cache = HostCache(cache_pools(1))
        first = held(cache, A)
        second = cache.acquire([A])

        cache.unpin(first)
        assert not cache.allocate(1)
        cache.unpin(second)
        assert cache.allocate(1)


class TestAllocation:
    def test_less_room_gives_fewer_slots(self) -> None:
        cache = HostCache(cache_pools(3))
        held(cache, A)

        assert len(cache.allocate(5)) == 2

    def test_slots_come_in_all_pools_or_in_none(self) -> None:
        """The draft pool is the smaller one: its end is the end, and no target slot leaks."""
        pools = cache_pools(4, draft_slots=2)
        cache = HostCache(pools)

        assert len(cache.allocate(4)) == 2
        assert [2, 0] == [pool.host.free_slots for pool in pools]

    def test_freed_slots_can_be_had_again(self) -> None:
        cache = HostCache(cache_pools(2))
        cache.free(cache.allocate(2))

        assert len(cache.allocate(2)) == 2

    def test_it_waits_for_room_that_comes(self) -> None:
        cache = HostCache(cache_pools(1))
        pinned = held(cache, A)
        got: list[int] = []
        waiter = threading.Thread(target=lambda: got.append(len(cache.allocate(1, timeout_s=20))))
        waiter.start()

        cache.unpin(pinned)
        waiter.join(20)

        assert got == [1]

    def test_clear_drops_what_is_idle_and_counts_what_stays(self) -> None:
        pools = cache_pools(4)
        cache = HostCache(pools)
        held(cache, A)
        put(cache, B, C)

        assert cache.clear() == 1
        assert [3, 3] == [pool.host.free_slots for pool in pools]


class TestDirtyPages:
    def dirty(self, slots: int) -> tuple[HostCache, list[Entry]]:
        to_write: list[Entry] = []
        cache = HostCache(cache_pools(slots), write_back=to_write.extend)
        return cache, to_write

    def put_dirty(self, cache: HostCache, *hashes: str) -> None:
        groups = cache.allocate(len(hashes))
        entries = [cache.insert(h, g, stored=False) for h, g in zip(hashes, groups, strict=True)]
        cache.unpin(entries)

    def test_a_dirty_page_is_written_before_it_goes(self) -> None:
        cache, to_write = self.dirty(2)
        self.put_dirty(cache, A, B)

        assert not cache.allocate(1)
        assert [B] == [entry.page_hash for entry in to_write]

        cache.written(to_write, [True])
        cache.unpin(to_write)
        assert len(cache.allocate(1)) == 1

    def test_no_more_pages_are_sent_to_be_written_than_are_needed(self) -> None:
        cache, to_write = self.dirty(4)
        self.put_dirty(cache, A, B, C, D)

        cache.allocate(2)

        assert len(to_write) == 2

    def test_a_page_that_could_not_be_written_can_go_all_the_same(self) -> None:
        cache, to_write = self.dirty(1)
        self.put_dirty(cache, A)
        cache.allocate(1)

        cache.give_up(to_write)

        assert len(cache.allocate(1)) == 1

    def test_a_page_is_claimed_for_writing_once(self) -> None:
        cache = HostCache(cache_pools(4))
        groups = cache.allocate(2)
        entries = [cache.insert(h, g, stored=False) for h, g in zip((A, B), groups, strict=True)]

        assert entries == cache.claim_for_writing(entries, uses=1)
        assert not cache.claim_for_writing(entries, uses=1)
        cache.written(entries, [True, False])
        assert entries[1:] == cache.claim_for_writing(entries, uses=1)


class TestPool:
    def test_a_pool_and_its_key_space_agree_on_the_size(self) -> None:
        pool = cache_pools()[0]
        with pytest.raises(ValueError, match="bytes a page"):
            CachePool(space=replace(pool.space, page_nbytes=7), host=pool.host)

    def test_a_pool_and_its_key_space_agree_on_the_layout(self) -> None:
        pool = cache_pools()[0]
        with pytest.raises(ValueError, match="layout"):
            CachePool(space=replace(pool.space, layout="layer_first"), host=pool.host)
