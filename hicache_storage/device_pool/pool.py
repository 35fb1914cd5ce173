"""Allocate slots for pages in device memory, the same for every pool of a group."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

from hicache_storage.device_pool.copier import LayerCopier
from hicache_storage.slot_allocator import SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.device_pool.slot_mapping import PerPool
    from hicache_storage.device_pool.tensors import LayeredPool
    from hicache_storage.device_pool.transfer import LayerTransfer


class DevicePool:
    """L1: slots that each hold a page of every pool in the group, target and draft. Thread-safe.

    A slot has the same number in all pools, so no pool has a page that another one lacks. If a slot
    is freed during a transfer, it becomes available when the transfer has settled.
    """

    def __init__(self, pools: Sequence[LayeredPool]) -> None:
        """Start the copying threads.

        Raises:
            ValueError: There is no pool, or the pools differ in device or page size.
        """
        self._copier = LayerCopier(pools)
        self._allocation = SlotAllocator(self._copier.slots)
        self._lock = threading.Lock()
        self._in_transfer: Counter[int] = Counter()
        self._freed_in_transfer: set[int] = set()

    @property
    def pools(self) -> tuple[LayeredPool, ...]:
        """All pools, in the order that `load` and `store` expect for `host_slots`."""
        return self._copier.pools

    @property
    def slots(self) -> int:
        """Number of slots, which is that of the smallest pool."""
        return self._allocation.count

    @property
    def free_slots(self) -> int:
        """Number of slots that `allocate` can return."""
        return self._allocation.free_count

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` slots of all pools, least recently freed first, or None if fewer are free.

        Raises:
            ValueError: `count` is negative.
        """
        return self._allocation.allocate(count)

    def free(self, slots: Iterable[int]) -> None:
        """Free slots, at once or when their transfers have settled.

        Raises:
            ValueError: A slot is not in use, or is given twice. Then no slot is freed.
        """
        freed = list(slots)
        with self._lock:
            self._check_used(freed)
            if len(set(freed)) != len(freed):
                raise ValueError(f"a slot is freed twice: {sorted(freed)}")
            moving = [slot for slot in freed if slot in self._in_transfer]
            self._allocation.free(slot for slot in freed if slot not in self._in_transfer)
            self._freed_in_transfer.update(moving)

    def load(
        self, host_slots: PerPool, device_slots: Sequence[int], *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """Copy pages from L2 to allocated slots of L1, as `LayerCopier.load` does.

        Raises:
            ValueError: A slot is not in use or is given twice, or the lists do not match.
            RuntimeError: The pool is closed.
        """
        return self._transfer(
            device_slots, lambda: self._copier.load(host_slots, device_slots, indices=indices)
        )

    def store(
        self, device_slots: Sequence[int], host_slots: PerPool, *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """Copy pages from allocated slots of L1 to L2, as `LayerCopier.store` does.

        Raises:
            ValueError: A slot is not in use or is given twice, or the lists do not match.
            RuntimeError: The pool is closed.
        """
        return self._transfer(
            device_slots, lambda: self._copier.store(device_slots, host_slots, indices=indices)
        )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish the transfers that have started, and stop the threads. Return False after `timeout_s`.

        Idempotent. The tensors stay with the caller.
        """
        return self._copier.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transfer(self, slots: Sequence[int], start: Callable[[], LayerTransfer]) -> LayerTransfer:
        used = list(slots)
        with self._lock:
            self._check_used(used)
            self._in_transfer.update(used)
        try:
            transfer = start()
        except BaseException:
            self._end_transfer(used)
            raise
        transfer.settled.add_done_callback(lambda _: self._end_transfer(used))
        return transfer

    def _end_transfer(self, slots: list[int]) -> None:
        with self._lock:
            self._in_transfer -= Counter(slots)
            freed = {slot for slot in self._freed_in_transfer if slot not in self._in_transfer}
            self._freed_in_transfer -= freed
            self._allocation.free(freed)

    def _check_used(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self._freed_in_transfer or not self._allocation.is_used(slot):
                raise ValueError(
                    f"device slot {slot} is not in use: it was freed, or never allocated"
                )
