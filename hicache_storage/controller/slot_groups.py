"""Slots of a page in several host pools: taken and given back together, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.controller.pool_set import numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits, PageSlots, PoolSet


class SlotGroups:
    """The free slots of all pools. Not thread-safe: the cache's lock guards it."""

    def __init__(self, pool_set: PoolSet) -> None:
        self._hosts = [pool.host for pool in pool_set.pools]

    def take(self, wanted: Bits) -> PageSlots | None:
        """One slot in each of the `wanted` pools, or none in any."""
        taken: PageSlots = [None] * len(self._hosts)
        for number in numbers(wanted):
            slot = self._hosts[number].allocate(1)
            if slot is None:
                self.free(taken)
                return None
            taken[number] = slot[0]
        return taken

    def exhausted(self, wanted: Bits) -> Bits:
        """Those of the `wanted` pools that have no free slot."""
        return sum(1 << number for number in numbers(wanted) if not self._hosts[number].free_slots)

    def free(self, slots: Sequence[int | None]) -> None:
        """Give a page's slots back."""
        for host, slot in zip(self._hosts, slots, strict=True):
            if slot is not None:
                host.free([slot])
