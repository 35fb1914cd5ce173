"""What L2 has room for: free slots, and those of pages that may go."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hicache_storage.controller.pool_set import numbers
from hicache_storage.controller.slot_groups import SlotGroups
from hicache_storage.controller.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import Bits, PageSlots, PoolSet


class Room:
    """Slots of all pools, and the pages that nobody has pinned, longest idle first.

    Not thread-safe: the cache's lock guards it. `forget` is told of each page that goes.
    """

    def __init__(
        self, pool_set: PoolSet, *, writes_back: bool, forget: Callable[[Entry], None]
    ) -> None:
        self.windows = Windows(pool_set)
        self.evicted = 0
        self._pool_set = pool_set
        self._writes_back = writes_back
        self._forget = forget
        self._slots = SlotGroups(pool_set)
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        self._leaving = 0

    # --- pages that stay, and pages that may go ------------------------------------------------------

    def pin(self, entry: Entry) -> None:
        """Somebody uses `entry`: it stays, and is the last to go after it."""
        entry.pins += 1
        self._idle.pop(entry.page_hash, None)
        self.windows.touch(entry)

    def stay(self, entry: Entry) -> bool:
        """Whether `entry` was on its way out, which it is no longer."""
        was_leaving, entry.leaving = entry.leaving, False
        self._leaving -= was_leaving
        return was_leaving

    def unpin(self, entry: Entry) -> None:
        """The end of one `pin`."""
        entry.pins -= 1
        if not entry.pins:
            self._idle[entry.page_hash] = entry
            if self.stay(entry):  # written to be evicted: the next to go
                self._idle.move_to_end(entry.page_hash, last=False)

    def clear(self) -> None:
        """Let every idle page go."""
        while self._idle:
            self._drop(self._idle.popitem(last=False)[1])

    # --- slots ---------------------------------------------------------------------------------------

    def take(self, wanted: Sequence[Bits]) -> tuple[list[PageSlots], list[Entry]]:
        """The slots that there are for `wanted`, in all pools or in none, up to the first that has none.

        And the pages that must be written before there are more: pinned, and on their way out.
        """
        got: list[PageSlots] = []
        dirty: list[Entry] = []
        for bits in wanted:
            while (slots := self._slots.take(bits)) is None:
                if not self._make(self._slots.exhausted(bits), len(wanted) - len(got), dirty):
                    return got, dirty
            got.append(slots)
        return got, dirty

    def is_there(self, wanted: Sequence[Bits]) -> bool:
        """Whether `take` gets anywhere: who waits for room sleeps until it does."""
        lacking = self._slots.exhausted(wanted[0]) if wanted else 0
        if lacking & self._pool_set.every_page:
            return self._can_evict(len(wanted))
        return all(self.windows.has_spare(n, self._is_spare) for n in numbers(lacking))

    def window(self, number: int) -> int | None:
        """A slot of a trailing pool, free or given up by a page that may; None where there is none."""
        return self.windows.slot(number, self._is_spare)

    def free(self, groups: Iterable[PageSlots]) -> None:
        """Give slots back."""
        for slots in groups:
            self._slots.free(slots)

    # --- how room is made ----------------------------------------------------------------------------

    def _make(self, lacking: Bits, pages: int, dirty: list[Entry]) -> bool:
        """Free a slot in the pools of `lacking`, one step of it; False where nothing can go."""
        if lacking & self._pool_set.every_page:
            if not self._can_evict(pages):
                return False
            self._evict(dirty)
            return True
        for number in numbers(lacking):
            slot = self.window(number)
            if slot is None:
                return False
            self._pool_set.pools[number].host.free([slot])
        return True

    def _can_evict(self, pages: int) -> bool:
        """Whether more should go than is on its way out, for `pages` pages to come."""
        return bool(self._idle) and self._leaving < pages

    def _evict(self, dirty: list[Entry]) -> None:
        """Let the page go that was idle longest, by way of `dirty` where it must be written first."""
        _, entry = self._idle.popitem(last=False)
        if not (self._writes_back and entry.owed(self._pool_set.written)):
            self._drop(entry)
            self.evicted += 1
        else:
            entry.pins += 1
            entry.queued = entry.leaving = True
            self._leaving += 1
            dirty.append(entry)

    def _drop(self, entry: Entry) -> None:
        self._forget(entry)
        self.windows.drop(entry)
        self._slots.free(entry.slots)

    def _is_spare(self, entry: Entry, number: int) -> bool:
        """Whether a page can lose its window in a trailing pool."""
        owed = self._writes_back and entry.owed(self._pool_set.written) >> number & 1
        return not entry.pins and not owed
