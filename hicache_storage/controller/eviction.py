"""Choose slots for new pages: free slots first, then those of pages that are evicted (LRU)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.controller.pools import pool_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.pools import PageSlots, PoolBits, PoolSet


@dataclass(slots=True, eq=False)
class Entry:
    """A page of L2, with its slot in each pool. Only the cache changes its fields, under its lock."""

    page_hash: str
    slots: PageSlots
    """The page's slot in each pool. A trailing pool has one only while a window needs the page."""
    filled: PoolBits
    """Pools whose slot holds the page. Other slots must not be read: their content is undefined."""
    stored: PoolBits
    """Pools in which the page is in L3 or will never be written, so that eviction loses nothing."""
    busy: PoolBits = 0
    """Pools whose slot is being filled, by a load or by an engine that recomputes the page."""
    pins: int = 1
    uses: int = 1
    queued: bool = False
    """True while the page waits to be written or is being written."""
    evicting: bool = False
    """True while the page is being written so that it can be evicted."""
    given_up: bool = False
    """True if the write before the page's eviction failed in a required pool. The page is then written
    in no pool, because L3 must not have it in an optional pool without the required pools."""

    def unsaved(self, written: PoolBits) -> PoolBits:
        """Return the pools of `written` whose page is in L2 and must still be written to L3."""
        return 0 if self.given_up else self.filled & ~self.stored & written


class PageSlotAllocator:
    """The free slots of all pools. Not thread-safe: the cache's lock guards it.

    The slots of a page are allocated and freed in all of its pools together.
    """

    def __init__(self, pool_set: PoolSet) -> None:
        self._hosts = [pool.host for pool in pool_set.pools]

    def allocate(self, wanted: PoolBits) -> PageSlots | None:
        """Return one slot in each of the `wanted` pools.

        If a pool is full, return None and take no slot.
        """
        taken: PageSlots = [None] * len(self._hosts)
        for number in pool_numbers(wanted):
            slot = self._hosts[number].allocate(1)
            if slot is None:
                self.free(taken)
                return None
            taken[number] = slot[0]
        return taken

    def exhausted(self, wanted: PoolBits) -> PoolBits:
        """Return the `wanted` pools that have no free slot."""
        return sum(
            1 << number for number in pool_numbers(wanted) if not self._hosts[number].free_slots
        )

    def free(self, slots: Sequence[int | None]) -> None:
        for host, slot in zip(self._hosts, slots, strict=True):
            if slot is not None:
                host.free([slot])


class TrailingSlots:
    """The pages that have a slot in each trailing pool, least recently used first.

    A trailing pool has few slots. A page has a slot there while its window is in use, and stays in L2 if
    it loses that slot. Not thread-safe: the cache's lock guards it.
    """

    def __init__(self, pool_set: PoolSet) -> None:
        self._pools = pool_set.pools
        self._holders: dict[int, OrderedDict[str, Entry]] = {
            number: OrderedDict() for number in pool_numbers(pool_set.trailing)
        }

    def record(self, entry: Entry, number: int) -> None:
        """Record the slot of a page in a pool, if the pool is trailing and the page has a slot there."""
        if number in self._holders and entry.slots[number] is not None:
            self._holders[number][entry.page_hash] = entry

    def touch(self, entry: Entry) -> None:
        """Make a page the most recently used one."""
        for number, holders in self._holders.items():
            if entry.slots[number] is not None:
                holders.move_to_end(entry.page_hash)

    def remove(self, entry: Entry) -> None:
        """Forget a page that leaves L2. The caller frees its slots."""
        for holders in self._holders.values():
            holders.pop(entry.page_hash, None)

    def release(self, entry: Entry, pools: PoolBits) -> None:
        """Free the slots of a page in these trailing pools. Windows that contain the page are lost."""
        for number in pool_numbers(pools):
            slot, entry.slots[number] = entry.slots[number], None
            self._holders[number].pop(entry.page_hash, None)
            if slot is not None:
                self._pools[number].host.free([slot])
        entry.filled &= ~pools
        entry.stored &= ~pools

    def evictable(self, number: int, is_evictable: Callable[[Entry, int], bool]) -> Entry | None:
        """Return the least recently used page that can lose its slot in a trailing pool, or None."""
        holders = self._holders[number].values()
        return next((entry for entry in holders if is_evictable(entry, number)), None)

    def allocate(self, number: int, is_evictable: Callable[[Entry, int], bool]) -> int | None:
        """Return a slot of a trailing pool: a free one, or that of the next evictable page (LRU).

        Return None if there is neither.
        """
        host = self._pools[number].host
        if not host.free_slots and (entry := self.evictable(number, is_evictable)):
            self.release(entry, 1 << number)
        got = host.allocate(1)
        return got[0] if got else None


class EvictingAllocator:
    """An allocator of slots in all pools, which evicts unpinned pages in LRU order.

    `on_drop` is called with each page that leaves L2. Not thread-safe: the cache's lock guards it.
    """

    def __init__(
        self, pool_set: PoolSet, *, writes_back: bool, on_drop: Callable[[Entry], None]
    ) -> None:
        self.trailing: TrailingSlots = TrailingSlots(pool_set)
        self.evicted_pages: int = 0
        self.evicting_pages: int = 0
        """How many pages are being written so that they can be evicted."""
        self._pool_set = pool_set
        self._writes_back = writes_back
        self._on_drop = on_drop
        self._slots = PageSlotAllocator(pool_set)
        self._unpinned: OrderedDict[str, Entry] = OrderedDict()

    # --- pins ----------------------------------------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Keep a page in L2 until `unpin`, and make it the most recently used one."""
        entry.pins += 1
        self._unpinned.pop(entry.page_hash, None)
        self.trailing.touch(entry)

    def cancel_eviction(self, entry: Entry) -> bool:
        """Mark a page as no longer being evicted. Return True if it was being evicted."""
        was_evicting, entry.evicting = entry.evicting, False
        self.evicting_pages -= was_evicting
        return was_evicting

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`. A page without pins can be evicted."""
        entry.pins -= 1
        if not entry.pins:
            self._unpinned[entry.page_hash] = entry
            if self.cancel_eviction(entry):  # it was written for its eviction, so evict it next
                self._unpinned.move_to_end(entry.page_hash, last=False)

    def clear(self) -> None:
        """Drop every unpinned page."""
        while self._unpinned:
            self._drop(self._unpinned.popitem(last=False)[1])

    # --- slots ---------------------------------------------------------------------------------------

    def allocate(self, wanted: Sequence[PoolBits]) -> tuple[list[PageSlots], list[Entry]]:
        """Return slots for the leading pages of `wanted`, each in all of its pools.

        Also return the pages that must be written before more slots can be freed. These pages are pinned
        and marked as queued and evicting.
        """
        got: list[PageSlots] = []
        to_write: list[Entry] = []
        for bits in wanted:
            while (slots := self._slots.allocate(bits)) is None:
                exhausted = self._slots.exhausted(bits)
                if not self._free_one(exhausted, len(wanted) - len(got), to_write):
                    return got, to_write
            got.append(slots)
        return got, to_write

    def can_allocate(self, wanted: Sequence[PoolBits]) -> bool:
        """Return True if `allocate` would return slots, or pages to write so that slots become free."""
        exhausted = self._slots.exhausted(wanted[0]) if wanted else 0
        if exhausted & self._pool_set.all_pages:
            return self._can_evict(len(wanted))
        return all(
            self.trailing.evictable(number, self._is_evictable)
            for number in pool_numbers(exhausted)
        )

    def allocate_trailing(self, number: int) -> int | None:
        """Return a slot of a trailing pool, if necessary by taking it from another page.

        Return None if no page can lose its slot.
        """
        return self.trailing.allocate(number, self._is_evictable)

    def free(self, groups: Iterable[PageSlots]) -> None:
        for slots in groups:
            self._slots.free(slots)

    # --- eviction ------------------------------------------------------------------------------------

    def _free_one(self, exhausted: PoolBits, pages: int, to_write: list[Entry]) -> bool:
        """Evict a page or a window to free slots of the `exhausted` pools.

        Return False if nothing can be evicted.
        """
        if exhausted & self._pool_set.all_pages:
            if not self._can_evict(pages):
                return False
            self._evict(to_write)
            return True
        for number in pool_numbers(exhausted):
            slot = self.allocate_trailing(number)
            if slot is None:
                return False
            self._pool_set.pools[number].host.free([slot])
        return True

    def _can_evict(self, pages: int) -> bool:
        """Return True if a page is unpinned and fewer than `pages` pages are being evicted."""
        return bool(self._unpinned) and self.evicting_pages < pages

    def _evict(self, to_write: list[Entry]) -> None:
        """Drop the least recently used page, or add it to `to_write` if it is unsaved."""
        _, entry = self._unpinned.popitem(last=False)
        if not (self._writes_back and entry.unsaved(self._pool_set.written)):
            self._drop(entry)
            self.evicted_pages += 1
        else:
            entry.pins += 1
            entry.queued = entry.evicting = True
            self.evicting_pages += 1
            to_write.append(entry)

    def _drop(self, entry: Entry) -> None:
        self._on_drop(entry)
        self.trailing.remove(entry)
        self._slots.free(entry.slots)

    def _is_evictable(self, entry: Entry, number: int) -> bool:
        """Return True if a page can lose its slot in a trailing pool."""
        unsaved = self._writes_back and entry.unsaved(self._pool_set.written) >> number & 1
        return not entry.pins and not unsaved
