"""The index of L2: which slots of the host pools hold a page, and which pages are pinned."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.eviction import Entry, EvictingAllocator
from hicache_storage.controller.pools import PoolSet, pool_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.pools import CachePool, PageSlots, PoolBits


class HostCache:
    """The pages of L2. Thread-safe. Pinned pages stay; the others are evicted in LRU order.

    A page of L2 has at least its required pools filled. `write_back` is called with pages that must be
    written before they can be evicted. These pages are pinned until `end_writes` and `unpin` are called
    for them. The callback runs under the lock, so that `claim_unsaved` finds each claimed page in a
    queue. Therefore it may only queue the pages, and must not wait.
    """

    def __init__(
        self,
        pools: Sequence[CachePool],
        *,
        write_back: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        self.pool_set: PoolSet = PoolSet(pools)
        self.pools: tuple[CachePool, ...] = self.pool_set.pools
        self._write_back = write_back
        self._entries: dict[str, Entry] = {}
        self._allocator = EvictingAllocator(
            self.pool_set, writes_back=write_back is not None, on_drop=self._forget
        )
        self._changed = threading.Condition()
        self._epoch = 0

    @property
    def evicted_pages(self) -> int:
        """How many pages have been evicted."""
        return self._allocator.evicted_pages

    @property
    def evicting_pages(self) -> int:
        """How many pages are being written so that they can be evicted."""
        return self._allocator.evicting_pages

    def __len__(self) -> int:
        return len(self._entries)

    # --- cached pages --------------------------------------------------------------------------------

    def pin(self, hashes: Iterable[str]) -> list[Entry | None]:
        """Pin the pages that are in L2. Return the entry of each page, or None if L2 lacks the page."""
        with self._changed:
            found = [self._entries.get(page_hash) for page_hash in hashes]
            for entry in found:
                if entry is not None:
                    self._pin(entry)
        return found

    def count_use(self, entries: Iterable[Entry]) -> None:
        """Count one use of each entry by a request."""
        with self._changed:
            for entry in entries:
                entry.uses += 1

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Unpin pages, the last one first, so that a prefix loses its tail before its head."""
        with self._changed:
            for entry in reversed(entries):
                self._allocator.unpin(entry)
            self._changed.notify_all()

    def clear(self) -> int:
        """Drop every unpinned page. Return how many pages stayed."""
        with self._changed:
            self._allocator.clear()
            self._changed.notify_all()
            return len(self._entries)

    # --- new pages -----------------------------------------------------------------------------------

    def allocate(
        self,
        wanted: Sequence[PoolBits],
        *,
        timeout_s: float = 0.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[PageSlots]:
        """Return slots for the pages of `wanted`, in all their pools. Evict unpinned pages if necessary.

        The list is shorter than `wanted` if the other pages of L2 are pinned or must first be written.
        With `timeout_s` the call waits up to that long for slots of the first page; for the other pages
        it waits only while pages are being evicted. It stops waiting if `stop`, which runs under the
        lock, returns True.
        """
        deadline = Deadline(timeout_s)
        got: list[PageSlots] = []
        with self._changed:
            while len(got) < len(wanted):
                more, to_write = self._allocator.allocate(wanted[len(got) :])
                got += more
                if to_write and self._write_back is not None:
                    self._write_back(to_write)
                if not self._wait_for_slots(wanted, len(got), deadline, stop):
                    break
        return got

    def free(self, groups: Iterable[PageSlots]) -> None:
        """Free slots that no page of L2 uses."""
        with self._changed:
            self._allocator.free(groups)
            self._changed.notify_all()

    def insert(
        self,
        page_hash: str,
        slots: PageSlots,
        *,
        filled: PoolBits,
        stored: PoolBits = 0,
        epoch: int | None = None,
    ) -> tuple[Entry, PageSlots]:
        """Add a page to L2, pinned, with the pools that are `filled`.

        If the page is already in L2, the filled pools that it lacked are added to it. Return the entry
        and the unused slots, which the caller frees.
        """
        with self._changed:
            stored = stored if epoch in (None, self._epoch) else 0
            entry = self._entries.get(page_hash)
            if entry is None:
                return self._insert_new(page_hash, slots, filled, stored)
            self._pin(entry)
            unused = list(slots)
            gained = filled & ~entry.filled & ~entry.busy
            # An unfilled slot can be exchanged, because nobody reads it.
            for number in pool_numbers(gained):
                unused[number], entry.slots[number] = entry.slots[number], unused[number]
                self._allocator.trailing.record(entry, number)
            entry.filled |= gained
            entry.stored |= stored & entry.filled
            return entry, unused

    def claim(self, entry: Entry, wanted: PoolBits) -> PoolBits:
        """Claim the right to fill unfilled slots of a pinned entry. Return the claimed pools.

        A pool is left out if it is filled, if another caller has claimed it, or if it is a trailing pool
        without a free slot. End each claim with `fill` or `unclaim`.
        """
        with self._changed:
            claimed = wanted & ~entry.filled & ~entry.busy
            for number in pool_numbers(claimed & self.pool_set.trailing):
                slot = self._allocator.allocate_trailing(number)
                if slot is None:
                    claimed &= ~(1 << number)
                    continue
                entry.slots[number] = slot
                self._allocator.trailing.record(entry, number)
            entry.busy |= claimed
            return claimed

    def fill(
        self,
        entry: Entry,
        filled: PoolBits,
        *,
        stored: PoolBits = 0,
        epoch: int | None = None,
    ) -> None:
        """Mark claimed pools of an entry as filled."""
        with self._changed:
            entry.busy &= ~filled
            entry.filled |= filled
            if epoch in (None, self._epoch):
                entry.stored |= stored

    def unclaim(self, entry: Entry, claimed: PoolBits) -> None:
        """Give up claimed pools of an entry, once nobody writes into their slots any more."""
        with self._changed:
            entry.busy &= ~claimed
            self._allocator.trailing.release(
                entry, claimed & ~entry.filled & self.pool_set.trailing
            )
            self._changed.notify_all()

    # --- writes to L3 --------------------------------------------------------------------------------

    def claim_for_writing(self, entries: Iterable[Entry], uses: int) -> list[Entry]:
        """Pin and return the entries that have enough uses, are unsaved, and are not queued.

        An entry that has left L2 is never returned, because its slots may hold another page by now.
        """
        with self._changed:
            claimed = [
                entry
                for entry in entries
                if entry.uses >= uses
                and not entry.queued
                and entry.unsaved(self.pool_set.written)
                and self._entries.get(entry.page_hash) is entry
            ]
            for entry in claimed:
                entry.queued = True
                self._allocator.pin(entry)
        return claimed

    def pools_to_write(self, entries: Iterable[Entry]) -> list[PoolBits]:
        """Return, for each entry, the pools to write next: the required pools before the optional ones.

        Therefore L3 never has a page of the draft without the target's, and readers find a usable prefix
        after any failure.
        """
        required = self.pool_set.required
        with self._changed:
            unsaved = [entry.unsaved(self.pool_set.written) for entry in entries]
        return [bits & required or bits for bits in unsaved]

    def mark_stored(self, entries: Iterable[Entry], pools: Iterable[PoolBits], epoch: int) -> None:
        """Mark `pools` of each entry as stored, unless `epoch` belongs to an earlier store."""
        with self._changed:
            if epoch == self._epoch:
                for entry, bits in zip(entries, pools, strict=True):
                    entry.stored |= bits

    def end_writes(self, entries: Iterable[Entry], epoch: int | None = None) -> None:
        """Mark `entries` as no longer queued. They stay pinned until `unpin`."""
        with self._changed:
            current = epoch in (None, self._epoch)
            for entry in entries:
                entry.queued = False
                if current and self._write_back is not None:
                    # A page whose write failed during its eviction is not written again.
                    if entry.unsaved(self.pool_set.written & self.pool_set.required):
                        entry.given_up = True
                    entry.stored |= entry.filled
            self._changed.notify_all()

    def abandon_writes(self, entries: Sequence[Entry], epoch: int | None = None) -> None:
        """Unpin `entries` without writing them. They may then be evicted without a write."""
        self.end_writes(entries, epoch)
        self.unpin(entries)

    def wait_written(self, hashes: Iterable[str], timeout_s: float) -> bool:
        """Wait until all writes of these pages have ended. Return False if `timeout_s` is not enough."""
        with self._changed:
            entries = [self._entries.get(page_hash) for page_hash in hashes]
            waiting = [entry for entry in entries if entry is not None and entry.queued]
            return self._changed.wait_for(lambda: not _still_queued(waiting), timeout_s)

    def claim_unsaved(self) -> list[Entry]:
        """Claim all unsaved pages for writing, before the store of a write-back cache is detached."""
        with self._changed:  # held throughout, or a page could leave L2 before it is claimed
            return self.claim_for_writing(list(self._entries.values()), uses=0)

    def new_epoch(self) -> int:
        """Begin the epoch of a new store: no page counts as stored in it. Return the epoch."""
        with self._changed:
            for entry in self._entries.values():
                entry.stored, entry.given_up = 0, False
            self._epoch += 1
            return self._epoch

    # --- under the lock ------------------------------------------------------------------------------

    def _pin(self, entry: Entry) -> None:
        """Pin a page and cancel its eviction.

        Wake callers that wait for slots: they need another page.
        """
        self._allocator.pin(entry)
        if self._allocator.cancel_eviction(entry):
            self._changed.notify_all()

    def _wait_for_slots(
        self, wanted: Sequence[PoolBits], got: int, deadline: Deadline, stop: Callable[[], bool]
    ) -> bool:
        """Wait until a page after the first `got` pages can get slots. Return False if none can."""
        missing, allocator = wanted[got:], self._allocator
        self._changed.wait_for(
            lambda: (
                allocator.can_allocate(missing) or stop() or (got and not allocator.evicting_pages)
            ),
            deadline.remaining_s(),
        )
        return allocator.can_allocate(missing)

    def _insert_new(
        self,
        page_hash: str,
        slots: PageSlots,
        filled: PoolBits,
        stored: PoolBits,
    ) -> tuple[Entry, PageSlots]:
        entry = Entry(page_hash, list(slots), filled, stored)
        self._entries[page_hash] = entry
        unused: PageSlots = [None] * len(slots)
        for number in pool_numbers(self.pool_set.trailing):
            if not filled >> number & 1:
                unused[number], entry.slots[number] = entry.slots[number], None
            self._allocator.trailing.record(entry, number)
        return entry, unused

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.page_hash]


def _still_queued(waiting: list[Entry]) -> bool:
    """Return True if an entry of `waiting` is still queued. Pop other entries from the end of the list.

    Each entry is popped at most once, so repeated calls stay cheap.
    """
    while waiting and not waiting[-1].queued:
        waiting.pop()
    return bool(waiting)
