from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from engines import cache_pools, optional_draft, until, windowed
from pages import hash_of

from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.eviction import Entry
from hicache_storage.controller.pools import CachePool, PageSlots

TARGET, DRAFT = 0b01, 0b10
BOTH = TARGET | DRAFT
"""The bits of the target and the draft pool."""
A, B, C, D = (hash_of(number) for number in range(4))


def held(cache: HostCache, *hashes: str) -> list[Entry]:
    """Insert pages into L2. Return them, still pinned."""
    slots = cache.allocate([BOTH] * len(hashes))
    return [inserted(cache, h, group, stored=BOTH) for h, group in zip(hashes, slots, strict=True)]


def inserted(cache: HostCache, page_hash: str, slots: PageSlots, *, stored: int = 0) -> Entry:
    entry, left = cache.insert(page_hash, slots, filled=BOTH, stored=stored)
    cache.free([left])
    return entry


def put(cache: HostCache, *hashes: str) -> None:
    cache.unpin(held(cache, *hashes))


def has(cache: HostCache, page_hash: str) -> bool:
    (found,) = cache.pin([page_hash])
    if found is not None:
        cache.unpin([found])
    return found is not None


class TestLookup:
    def test_pin_returns_cached_pages_and_none_for_others(self) -> None:
        cache = HostCache(cache_pools(4))
        put(cache, A, B, D)

        found = cache.pin([A, B, C, D])

        assert [A, B, None, D] == [entry and entry.page_hash for entry in found]

    def test_a_page_that_is_there_already_keeps_its_slots(self) -> None:
        pools = cache_pools(4)
        cache = HostCache(pools)
        (first,) = held(cache, A)

        (second,) = held(cache, A)

        assert first is second
        assert [3, 3] == [pool.host.free_slots for pool in pools]


class TestEviction:
    def test_the_least_recently_used_page_is_evicted_first(self) -> None:
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

    def test_a_page_pinned_twice_is_evictable_after_both_unpins(self) -> None:
        cache = HostCache(cache_pools(1))
        first = held(cache, A)
        (second,) = cache.pin([A])
        assert second is not None

        cache.unpin(first)
        assert not cache.allocate([BOTH])
        cache.unpin([second])
        assert cache.allocate([BOTH])


class TestAllocation:
    def test_a_full_pool_gives_fewer_slots(self) -> None:
        cache = HostCache(cache_pools(3))
        held(cache, A)

        assert len(cache.allocate([BOTH] * 5)) == 2

    def test_slots_come_in_all_pools_or_in_none(self) -> None:
        """The draft pool is smaller and limits the pages; no target slot leaks."""
        pools = cache_pools(4, draft_slots=2)
        cache = HostCache(pools)

        assert len(cache.allocate([BOTH] * 4)) == 2
        assert [2, 0] == [pool.host.free_slots for pool in pools]

    def test_freed_slots_can_be_had_again(self) -> None:
        cache = HostCache(cache_pools(2))
        cache.free(cache.allocate([BOTH] * 2))

        assert len(cache.allocate([BOTH] * 2)) == 2

    def test_allocate_waits_for_a_slot(self) -> None:
        cache = HostCache(cache_pools(1))
        pinned = held(cache, A)
        got: list[int] = []
        waiter = threading.Thread(
            target=lambda: got.append(len(cache.allocate([BOTH], timeout_s=20)))
        )
        waiter.start()

        cache.unpin(pinned)
        waiter.join(20)

        assert got == [1]

    def test_allocate_sleeps_while_nothing_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """L2 has an unpinned page, but no window that could be evicted."""
        cache = HostCache(windowed(4, window_slots=1))
        all_pools = cache.pool_set.all_pools
        (pinned,) = cache.allocate([all_pools])
        cache.insert(A, pinned, filled=all_pools)
        put(cache, B)
        tries: list[int] = []
        allocate = cache._allocator._slots.allocate

        def counted(bits: int) -> PageSlots | None:
            tries.append(bits)
            return allocate(bits)

        monkeypatch.setattr(cache._allocator._slots, "allocate", counted)

        assert not cache.allocate([all_pools], timeout_s=0.2)

        assert len(tries) < 10

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
        groups = cache.allocate([BOTH] * len(hashes))
        entries = [inserted(cache, h, g) for h, g in zip(hashes, groups, strict=True)]
        cache.unpin(entries)

    def test_a_dirty_page_is_written_before_it_goes(self) -> None:
        cache, to_write = self.dirty(2)
        self.put_dirty(cache, A, B)

        assert not cache.allocate([BOTH])
        assert [B] == [entry.page_hash for entry in to_write]

        cache.mark_stored(to_write, [BOTH], epoch=0)
        cache.end_writes(to_write)
        cache.unpin(to_write)
        assert len(cache.allocate([BOTH])) == 1

    def test_no_more_pages_are_sent_to_be_written_than_are_needed(self) -> None:
        cache, to_write = self.dirty(4)
        self.put_dirty(cache, A, B, C, D)

        cache.allocate([BOTH] * 2)

        assert len(to_write) == 2

    def test_a_free_slot_is_allocated_while_pages_are_being_evicted(self) -> None:
        cache, _ = self.dirty(2)
        self.put_dirty(cache, A)
        free = cache.allocate([BOTH])
        assert not cache.allocate([BOTH])  # A is being written

        cache.free(free)

        assert len(cache.allocate([BOTH])) == 1

    def test_no_draft_is_written_whose_target_could_not_be(self) -> None:
        to_write: list[Entry] = []
        cache = HostCache(optional_draft(1), write_back=to_write.extend)
        (slots,) = cache.allocate([BOTH])
        entry, _ = cache.insert(A, slots, filled=TARGET)
        cache.unpin([entry])
        assert not cache.allocate([BOTH])
        cache.pin([A])  # it is used again, and stays
        cache.end_writes(to_write)
        cache.unpin(to_write)

        assert cache.claim(entry, DRAFT) == DRAFT
        cache.fill(entry, DRAFT)

        assert not cache.claim_unsaved()

    def test_a_page_that_could_not_be_written_is_tried_again_on_the_next_store(self) -> None:
        cache, to_write = self.dirty(1)
        self.put_dirty(cache, A)
        assert not cache.allocate([BOTH])
        (entry,) = to_write
        cache.pin([A])
        cache.end_writes(to_write)
        cache.unpin(to_write)
        assert not cache.claim_unsaved()

        cache.new_epoch()

        assert [entry] == cache.claim_unsaved()

    def test_a_page_that_could_not_be_written_is_evicted(self) -> None:
        cache, to_write = self.dirty(1)
        self.put_dirty(cache, A)
        cache.allocate([BOTH])

        cache.abandon_writes(to_write)

        assert len(cache.allocate([BOTH])) == 1

    def test_allocate_waits_until_every_page_is_evicted(self) -> None:
        """A clean page leaves at once, a dirty one after its write."""
        cache, to_write = self.dirty(2)
        self.put_dirty(cache, A, B)
        cache.allocate([BOTH])
        cache.abandon_writes(to_write)  # it is clean now
        got: list[int] = []
        waiter = threading.Thread(
            target=lambda: got.append(len(cache.allocate([BOTH] * 2, timeout_s=20)))
        )
        waiter.start()
        until(lambda: len(to_write) == 2)

        cache.abandon_writes(to_write[1:])

        waiter.join(20)
        assert got == [2]

    def test_allocate_evicts_another_page_where_the_first_is_used_again(self) -> None:
        cache, to_write = self.dirty(2)
        self.put_dirty(cache, A, B)
        waiter = threading.Thread(target=lambda: cache.allocate([BOTH], timeout_s=20))
        waiter.start()
        until(lambda: to_write)

        cache.pin([B])

        until(lambda: len(to_write) == 2)
        assert [B, A] == [entry.page_hash for entry in to_write]
        cache.abandon_writes(to_write)
        waiter.join(20)

    def test_a_page_is_claimed_for_writing_once(self) -> None:
        cache = HostCache(cache_pools(4))
        groups = cache.allocate([BOTH] * 2)
        entries = [inserted(cache, h, g) for h, g in zip((A, B), groups, strict=True)]

        assert entries == cache.claim_for_writing(entries, uses=1)
        assert not cache.claim_for_writing(entries, uses=1)
        cache.mark_stored(entries, [BOTH, 0], epoch=0)
        cache.end_writes(entries)
        assert entries[1:] == cache.claim_for_writing(entries, uses=1)


class TestPool:
    def test_a_pool_and_its_key_space_agree_on_the_size(self) -> None:
        pool = cache_pools()[0]
        with pytest.raises(ValueError, match="a page has 7 bytes in the key space, but"):
            CachePool(space=replace(pool.space, page_nbytes=7), host=pool.host)

    def test_a_pool_and_its_key_space_agree_on_the_layout(self) -> None:
        pool = cache_pools()[0]
        with pytest.raises(ValueError, match="layout"):
            CachePool(space=replace(pool.space, layout="layer_first"), host=pool.host)
