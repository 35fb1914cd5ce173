"""Slots of trailing pools: few, held by the pages that some window needed last."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hicache_storage.controller.pool_set import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import Bits, PoolSet


class Windows:
    """Which pages have a slot in which trailing pool, least recently used first.

    Not thread-safe: the cache's lock guards it. A window gives way to another; its page stays in L2.
    """

    def __init__(self, pool_set: PoolSet) -> None:
        self._pools = pool_set.pools
        self._holders: dict[int, OrderedDict[str, Entry]] = {
            number: OrderedDict() for number in numbers(pool_set.trailing)
        }

    def note(self, entry: Entry, number: int) -> None:
        """A page may have come by a slot in a pool, trailing or not."""
        if number in self._holders and entry.slots[number] is not None:
            self._holders[number][entry.page_hash] = entry

    def touch(self, entry: Entry) -> None:
        """A page is used."""
        for number, holders in self._holders.items():
            if entry.slots[number] is not None:
                holders.move_to_end(entry.page_hash)

    def drop(self, entry: Entry) -> None:
        """A page leaves L2; its slots are freed with the others."""
        for holders in self._holders.values():
            holders.pop(entry.page_hash, None)

    def shed(self, entry: Entry, pools: Bits) -> None:
        """Free a page's slots in these trailing pools: no window that reaches over it is whole then."""
        for number in numbers(pools):
            slot, entry.slots[number] = entry.slots[number], None
            self._holders[number].pop(entry.page_hash, None)
            if slot is not None:
                self._pools[number].host.free([slot])
        entry.filled &= ~pools
        entry.stored &= ~pools

    def has_spare(self, number: int, may_go: Callable[[Entry, int], bool]) -> bool:
        """Whether some page's slot of a trailing pool may go."""
        return any(may_go(entry, number) for entry in self._holders[number].values())

    def slot(self, number: int, may_go: Callable[[Entry, int], bool]) -> int | None:
        """A slot of a trailing pool: a free one, or that of the page used longest ago that may go."""
        host = self._pools[number].host
        got = host.allocate(1)
        if got is None:
            entry = next((e for e in self._holders[number].values() if may_go(e, number)), None)
            if entry is not None:
                self.shed(entry, 1 << number)
                got = host.allocate(1)
        return got[0] if got else None
