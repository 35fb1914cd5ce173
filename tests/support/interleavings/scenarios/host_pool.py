"""Threads that allocate, fill and free the slots of one host pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hicache_storage.host_pool import HostPool, PageShape
from interleavings.scenario import Scenario

_SHAPE = PageShape.mha(page_tokens=2, layers=1, heads=1, head_dim=4, dtype="bfloat16")
_SLOTS = 4
_ROUNDS = 4


class HostPoolScenario(Scenario):
    """No slot has two owners, free and used slots add up, and every slot comes back."""

    name = "host-pool"

    def set_up(self) -> None:
        self.pool = HostPool(_SHAPE, slots=_SLOTS, pin=False)
        self.held: dict[int, int] = {}
        """The thread that holds each slot."""

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {f"user-{number}": partial(self._use, number) for number in range(3)}

    def check(self) -> None:
        allocation = self.pool._allocation
        if allocation._lock.locked():  # no other thread sees a change that is under way
            return
        used = sum(allocation._used)
        assert allocation.free_count + used == _SLOTS, "free and used slots do not add up"
        assert len(self.held) <= used, "more slots are held than are used"

    def finish(self) -> None:
        self.require(self.pool.free_slots == _SLOTS, "a slot was not given back")
        self.pool.close()

    def _use(self, number: int) -> None:
        for _ in range(_ROUNDS):
            slots = self.pool.allocate(self.pick((1, 2, 3)))
            if slots is None:
                continue
            for slot in slots:
                self.require(slot not in self.held, f"slot {slot} is in two hands")
                self.held[slot] = number
                self.pool.tile_page(slot).copy_from(self._content(number, slot))
            self.scheduler.point("has filled its slots")
            for slot in slots:
                held = self.pool.tile_page(slot).tobytes()
                self.require(held == self._content(number, slot), f"slot {slot} was overwritten")
                del self.held[slot]
            self.pool.free(slots)

    def _content(self, number: int, slot: int) -> bytes:
        return bytes([number * _SLOTS + slot]) * _SHAPE.nbytes
