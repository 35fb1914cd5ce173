"""L2's table of contents: page hash → a slot in the host pool of every pool, LRU with pins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from hicache_storage.controller.entry import Entry
from hicache_storage.controller.pool_set import PoolSet, numbers
from hicache_storage.controller.slot_groups import SlotGroups
from hicache_storage.controller.windows import Windows
from hicache_storage.seconds import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.pool_set import Bits, PageSlots
    from hicache_storage.controller.pools import CachePool


class HostCache:
    """The pages of L2. Thread-safe; pinned pages stay, the others go in LRU order.

    A page is in L2 with at least its required pools filled. `write_back` is called, without the lock,
    with entries that must be written before they can go. They are pinned for it; `written` and `unpin`
    end that.
    """

    def __init__(
        self,
        pools: Sequence[CachePool],
        *,
        write_back: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        self.pool_set = PoolSet(pools)
        self.pools = self.pool_set.pools
        self._slots = SlotGroups(self.pool_set)
        self._write_back = write_back
        self._entries: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        self._windows = Windows(self.pool_set)
        self._changed = threading.Condition()
        self._evicted = 0
        self._leaving = 0
        self._epoch = 0

    @property
    def evicted_pages(self) -> int:
        """Pages that made room for others."""
        return self._evicted

    def __len__(self) -> int:
        return len(self._entries)

    # --- pages that are there ------------------------------------------------------------------------

    def hold(self, hashes: Iterable[str]) -> list[Entry | None]:
        """Pin those of `hashes` that L2 has; None stands for the others."""
        with self._changed:
            found = [self._entries.get(page_hash) for page_hash in hashes]
            for entry in found:
                if entry is not None:
                    self._pin(entry)
                    self._stay(entry)
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
                entry.pins -= 1
                if not entry.pins:
                    self._idle[entry.page_hash] = entry
                    if self._stay(entry):  # written to be evicted: the next to go
                        self._idle.move_to_end(entry.page_hash, last=False)
            self._changed.notify_all()

    def clear(self) -> int:
        """Drop every idle page; how many pages are pinned and stayed."""
        with self._changed:
            while self._idle:
                self._drop(self._idle.popitem(last=False)[1])
            self._changed.notify_all()
            return len(self._entries)

    # --- pages to come -------------------------------------------------------------------------------

    def allocate(self, wanted: Sequence[Bits], *, timeout_s: float = 0.0) -> list[PageSlots]:
        """For each of `wanted`, a page's slots in these pools, in all or in none; evicts what is idle.

        Fewer where the rest is pinned or must be written first; with `timeout_s` it waits that long for
        the first of them.
        """
        deadline_s = time.monotonic() + min(timeout_s, LONGEST_S)
        while True:
            left_s = deadline_s - time.monotonic()
            got, dirty = self._allocate_now(wanted, max(0.0, left_s))
            if dirty and self._write_back is not None:
                self._write_back(dirty)
            if got or not wanted or left_s <= 0:
                return got

    def free(self, groups: Iterable[PageSlots]) -> None:
        """Give slots back that never became part of L2."""
        with self._changed:
            for slots in groups:
                self._slots.free(slots)
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
            self._pin(entry)
            self._stay(entry)
            left = list(slots)
            gained = filled & ~entry.filled & ~entry.busy
            for number in numbers(gained):  # nobody reads an unfilled slot: it can be exchanged
                left[number], entry.slots[number] = entry.slots[number], left[number]
                self._windows.note(entry, number)
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
                slot = self._windows.slot(number, self._is_spare)
                if slot is None:
                    claimed &= ~(1 << number)
                    continue
                entry.slots[number] = slot
                self._windows.note(entry, number)
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
            self._windows.shed(entry, claimed & ~entry.filled & self.pool_set.trailing)
            self._changed.notify_all()

    # --- pages to be written -------------------------------------------------------------------------

    def claim_for_writing(self, entries: Iterable[Entry], uses: int) -> list[Entry]:
        """Those of `entries` with enough uses that L3 is owed, and not on their way; each is pinned."""
        with self._changed:
            claimed = [
                entry
                for entry in entries
                if entry.uses >= uses and not entry.queued and self._owed(entry)
            ]
            for entry in claimed:
                entry.queued = True
                self._pin(entry)
        return claimed

    def due(self, entries: Iterable[Entry]) -> list[Bits]:
        """The pools of each that are to be written next: optional ones after all that are required.

        No draft page is in L3 before its target's page is: whatever fails, a reader finds a prefix.
        """
        required = self.pool_set.required
        with self._changed:
            owed = [self._owed(entry) for entry in entries]
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

    def give_up(self, entries: Sequence[Entry], epoch: int | None = None) -> None:
        """`entries` will not be written: unpin them, and let them be evicted without it."""
        self.written(entries, epoch)
        self.unpin(entries)

    def unwritten(self) -> list[Entry]:
        """All pages that L3 is owed, claimed for writing: what a write-back cache owes at its end."""
        with self._changed:
            everything = list(self._entries.values())
        return self.claim_for_writing(everything, uses=0)

    def new_epoch(self) -> int:
        """Another store has none of the pages: forget what is stored. Names the store in later calls."""
        with self._changed:
            for entry in self._entries.values():
                entry.stored = 0
            self._epoch += 1
            return self._epoch

    # --- under the lock ------------------------------------------------------------------------------

    def _owed(self, entry: Entry) -> Bits:
        return entry.filled & ~entry.stored & self.pool_set.written

    def _make(
        self, page_hash: str, slots: PageSlots, filled: Bits, stored: Bits, busy: Bits
    ) -> tuple[Entry, PageSlots]:
        entry = Entry(page_hash, list(slots), filled, stored, busy)
        self._entries[page_hash] = entry
        left: PageSlots = [None] * len(slots)
        for number in numbers(self.pool_set.trailing):
            if not (filled | busy) >> number & 1:
                left[number], entry.slots[number] = entry.slots[number], None
            self._windows.note(entry, number)
        return entry, left

    def _pin(self, entry: Entry) -> None:
        entry.pins += 1
        self._idle.pop(entry.page_hash, None)
        self._windows.touch(entry)

    def _stay(self, entry: Entry) -> bool:
        """Whether `entry` was on its way out, which it is no longer."""
        was_leaving, entry.leaving = entry.leaving, False
        self._leaving -= was_leaving
        return was_leaving

    def _allocate_now(
        self, wanted: Sequence[Bits], timeout_s: float
    ) -> tuple[list[PageSlots], list[Entry]]:
        """The slots that there are, and the pages that must be written before there are more."""
        got: list[PageSlots] = []
        dirty: list[Entry] = []
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(wanted), timeout_s)
            while len(got) < len(wanted):
                bits = wanted[len(got)]
                slots = self._slots.take(bits)
                if slots is not None:
                    got.append(slots)
                elif not self._make_room(
                    self._slots.exhausted(bits), len(wanted) - len(got), dirty
                ):
                    break
        return got, dirty

    def _has_room(self, wanted: Sequence[Bits]) -> bool:
        """Whether `_make_room` gets anywhere: who waits for it sleeps until it does."""
        lacking = self._slots.exhausted(wanted[0]) if wanted else 0
        if lacking & self.pool_set.every_page:
            return self._can_evict(len(wanted))
        return all(self._windows.has_spare(n, self._is_spare) for n in numbers(lacking))

    def _can_evict(self, pages: int) -> bool:
        """Whether more should go than is on its way out, for `pages` pages to come."""
        return bool(self._idle) and self._leaving < pages

    def _make_room(self, lacking: Bits, pages: int, dirty: list[Entry]) -> bool:
        """Free a slot in the pools of `lacking`, one step of it; False where nothing can go."""
        if lacking & self.pool_set.every_page:
            if not self._can_evict(pages):
                return False
            self._evict(dirty)
            return True
        for number in numbers(lacking):
            slot = self._windows.slot(number, self._is_spare)
            if slot is None:
                return False
            self.pools[number].host.free([slot])
        return True

    def _evict(self, dirty: list[Entry]) -> None:
        """Let the page go that was idle longest, by way of `dirty` where it must be written first."""
        _, entry = self._idle.popitem(last=False)
        if self._write_back is None or not self._owed(entry):
            self._drop(entry)
            self._evicted += 1
        else:
            entry.pins += 1
            entry.queued = entry.leaving = True
            self._leaving += 1
            dirty.append(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.page_hash]
        self._windows.drop(entry)
        self._slots.free(entry.slots)

    def _is_spare(self, entry: Entry, number: int) -> bool:
        """Whether a page can lose its window in a trailing pool."""
        owed = self._write_back is not None and self._owed(entry) >> number & 1
        return not entry.pins and not owed
