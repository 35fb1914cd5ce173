"""L2's table of contents: page hash → a slot in the host pool of every pool, LRU with pins."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_storage.controller.entry import Entry
from hicache_storage.controller.eviction import Room
from hicache_storage.controller.pool_set import PoolSet, numbers
from hicache_storage.durations import MAX_DURATION_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.pool_set import Bits, PageSlots
    from hicache_storage.controller.pools import CachePool


class HostCache:
    """The pages of L2. Thread-safe; pinned pages stay, the others go in LRU order.

    A page is in L2 with at least its required pools filled. `write_back` is called with entries that
    must be written before they can go. They are pinned for it; `written` and `unpin` end that. The call
    is made under the lock, so that no page is claimed for writing and in nobody's queue (`unwritten`):
    it queues, and waits for nothing.
    """

    def __init__(
        self,
        pools: Sequence[CachePool],
        *,
        write_back: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        self.pool_set = PoolSet(pools)
        self.pools = self.pool_set.pools
        self._write_back = write_back
        self._entries: dict[str, Entry] = {}
        self._room = Room(self.pool_set, writes_back=write_back is not None, forget=self._forget)
        self._changed = threading.Condition()
        self._epoch = 0

    @property
    def evicted_pages(self) -> int:
        """Pages that made room for others."""
        return self._room.evicted

    def __len__(self) -> int:
        return len(self._entries)

    # --- pages that are there ------------------------------------------------------------------------

    def hold(self, hashes: Iterable[str]) -> list[Entry | None]:
        """Pin those of `hashes` that L2 has; None stands for the others."""
        with self._changed:
            found = [self._entries.get(page_hash) for page_hash in hashes]
            for entry in found:
                if entry is not None:
                    self._room.pin(entry)
                    self._room.stay(entry)
        return found

    def use(self, entries: Iterable[Entry]) -> None:
        """Count a request's use of each of them."""
        with self._changed:
            for entry in entries:
                entry.uses += 1

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Let go of pinned pages, the last first: a prefix loses its tail before its head."""
        with self._changed:
            for entry in reversed(entries):
                self._room.unpin(entry)
            self._changed.notify_all()

    def clear(self) -> int:
        """Drop every idle page; how many pages are pinned and stayed."""
        with self._changed:
            self._room.clear()
            self._changed.notify_all()
            return len(self._entries)

    # --- pages to come -------------------------------------------------------------------------------

    def allocate(self, wanted: Sequence[Bits], *, timeout_s: float = 0.0) -> list[PageSlots]:
        """For each of `wanted`, a page's slots in these pools, in all or in none; evicts what is idle.

        Fewer where the rest is pinned or must be written first; with `timeout_s` it waits that long for
        the first of them.
        """
        deadline_s = time.monotonic() + min(timeout_s, MAX_DURATION_S)
        while True:
            left_s = deadline_s - time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._room.is_there(wanted), max(0.0, left_s))
                got, dirty = self._room.take(wanted)
                if dirty and self._write_back is not None:
                    self._write_back(dirty)
            if got or not wanted or left_s <= 0:
                return got

    def free(self, groups: Iterable[PageSlots]) -> None:
        """Give slots back that never became part of L2."""
        with self._changed:
            self._room.free(groups)
            self._changed.notify_all()

    def insert(
        self,
        page_hash: str,
        slots: PageSlots,
        *,
        filled: Bits,
        stored: Bits = 0,
        busy: Bits = 0,
        epoch: int | None = None,
    ) -> tuple[Entry, PageSlots]:
        """Make a page part of L2, pinned, with the pools that are `filled`.

        Where it is there already it gains the pools that it lacked. Gives the entry, and the slots that
        it had no use for: they are the caller's to free, once nobody writes into them. `busy` pools of a
        new entry are being filled; `unclaim` ends that.
        """
        with self._changed:
            stored = stored if epoch in (None, self._epoch) else 0
            entry = self._entries.get(page_hash)
            if entry is None:
                return self._make(page_hash, slots, filled, stored, busy)
            self._room.pin(entry)
            self._room.stay(entry)
            left = list(slots)
            gained = filled & ~entry.filled & ~entry.busy
            for number in numbers(gained):  # nobody reads an unfilled slot: it can be exchanged
                left[number], entry.slots[number] = entry.slots[number], left[number]
                self._room.windows.note(entry, number)
            entry.filled |= gained
            entry.stored |= stored & entry.filled
            return entry, left

    def claim(self, entry: Entry, wanted: Bits) -> Bits:
        """The right to fill the slots of a pinned entry that are not; which of `wanted` it is given for.

        Not for what is filled, or claimed by another, or a trailing pool without a free slot. Each pool
        claimed ends in `fill` or `unclaim`.
        """
        with self._changed:
            claimed = wanted & ~entry.filled & ~entry.busy
            for number in numbers(claimed & self.pool_set.trailing):
                slot = self._room.window(number)
                if slot is None:
                    claimed &= ~(1 << number)
                    continue
                entry.slots[number] = slot
                self._room.windows.note(entry, number)
            entry.busy |= claimed
            return claimed

    def fill(
        self, entry: Entry, filled: Bits, *, stored: Bits = 0, epoch: int | None = None
    ) -> None:
        """Claimed pools of an entry hold the page now."""
        with self._changed:
            entry.busy &= ~filled
            entry.filled |= filled
            if epoch in (None, self._epoch):
                entry.stored |= stored

    def unclaim(self, entry: Entry, claimed: Bits) -> None:
        """Claimed pools of an entry were not filled, and nobody writes into their slots any more."""
        with self._changed:
            entry.busy &= ~claimed
            self._room.windows.shed(entry, claimed & ~entry.filled & self.pool_set.trailing)
            self._changed.notify_all()

    # --- pages to be written -------------------------------------------------------------------------

    def claim_for_writing(self, entries: Iterable[Entry], uses: int) -> list[Entry]:
        """Those of `entries` with enough uses that L3 is owed, and not on their way; each is pinned.

        An entry that has left L2 is none of them: its slots hold another page by now.
        """
        with self._changed:
            claimed = [
                entry
                for entry in entries
                if entry.uses >= uses
                and not entry.queued
                and entry.owed(self.pool_set.written)
                and self._entries.get(entry.page_hash) is entry
            ]
            for entry in claimed:
                entry.queued = True
                self._room.pin(entry)
        return claimed

    def due(self, entries: Iterable[Entry]) -> list[Bits]:
        """The pools of each that are to be written next: optional ones after all that are required.

        No draft page is in L3 before its target's page is: whatever fails, a reader finds a prefix.
        """
        required = self.pool_set.required
        with self._changed:
            owed = [entry.owed(self.pool_set.written) for entry in entries]
        return [bits & required or bits for bits in owed]

    def stored(self, entries: Iterable[Entry], pools: Iterable[Bits], epoch: int) -> None:
        """L3 has these `pools` of each; nothing where `epoch` is not the current store's."""
        with self._changed:
            if epoch == self._epoch:
                for entry, bits in zip(entries, pools, strict=True):
                    entry.stored |= bits

    def written(self, entries: Iterable[Entry], epoch: int | None = None) -> None:
        """The end of writing `entries`, which stay pinned until `unpin`."""
        with self._changed:
            current = epoch in (None, self._epoch)
            for entry in entries:
                entry.queued = False
                if current and self._write_back is not None:
                    # A page that was to be written at its eviction and could not be is forgotten.
                    entry.stored |= entry.filled
            self._changed.notify_all()

    def give_up(self, entries: Sequence[Entry], epoch: int | None = None) -> None:
        """`entries` will not be written: unpin them, and let them be evicted without it."""
        self.written(entries, epoch)
        self.unpin(entries)

    def wait_written(self, hashes: Iterable[str], timeout_s: float) -> bool:
        """Wait until none of these pages is on its way to L3; False where one is after `timeout_s`."""
        with self._changed:
            entries = [self._entries.get(page_hash) for page_hash in hashes]
            waiting = [entry for entry in entries if entry is not None and entry.queued]
            return self._changed.wait_for(lambda: not _still_queued(waiting), timeout_s)

    def unwritten(self) -> list[Entry]:
        """All pages that L3 is owed, claimed for writing: what a write-back cache owes at its end."""
        with self._changed:  # also while they are claimed: else they can leave L2 in between
            return self.claim_for_writing(list(self._entries.values()), uses=0)

    def new_epoch(self) -> int:
        """Another store has none of the pages: forget what is stored. Names the store in later calls."""
        with self._changed:
            for entry in self._entries.values():
                entry.stored = 0
            self._epoch += 1
            return self._epoch

    # --- under the lock ------------------------------------------------------------------------------

    def _make(
        self, page_hash: str, slots: PageSlots, filled: Bits, stored: Bits, busy: Bits
    ) -> tuple[Entry, PageSlots]:
        entry = Entry(page_hash, list(slots), filled, stored, busy)
        self._entries[page_hash] = entry
        left: PageSlots = [None] * len(slots)
        for number in numbers(self.pool_set.trailing):
            if not (filled | busy) >> number & 1:
                left[number], entry.slots[number] = entry.slots[number], None
            self._room.windows.note(entry, number)
        return entry, left

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.page_hash]


def _still_queued(waiting: list[Entry]) -> bool:
    """Whether one of them is; those that are not any more are left out, so that each is seen once."""
    while waiting and not waiting[-1].queued:
        waiting.pop()
    return bool(waiting)
