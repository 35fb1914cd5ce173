"""Slots for pages in device memory, the same for every pool of a group."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

from hicache_storage.device_pool.copier import LayerCopier
from hicache_storage.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.device_pool.routes import PerPool
    from hicache_storage.device_pool.tensors import LayeredPool
    from hicache_storage.device_pool.transfer import LayerTransfer


class DevicePool:
    """L1: slots that hold a page of every pool of the group, target and draft alike. Thread-safe.

    There is one number for all pools, so that none has a page that another has not. A slot that is given
    back while a transfer still uses it goes to nobody else before the transfer has settled.
    """

    def __init__(self, pools: Sequence[LayeredPool]) -> None:
        """Start the copying threads.

        Raises:
            ValueError: No pool, or pools of different devices or page sizes.
        """
        self._copier = LayerCopier(pools)
        self._allocation = Slots(self._copier.slots)
        self._lock = threading.Lock()
        self._moving: Counter[int] = Counter()
        self._leaving: set[int] = set()

    @property
    def pools(self) -> tuple[LayeredPool, ...]:
        """In the order of the host slots of `load` and `store`."""
        return self._copier.pools

    @property
    def slots(self) -> int:
        """How many pages there is room for: as many as in the smallest pool."""
        return self._allocation.count

    @property
    def free_slots(self) -> int:
        """How many slots `allocate` could give."""
        return self._allocation.free_count

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots in all pools, those that were freed first; None where there are not as many.

        Raises:
            ValueError: A negative count.
        """
        return self._allocation.allocate(count)

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back, at once or when what moves them has settled.

        Raises:
            ValueError: A slot is not in use, or is named twice. Nothing is freed then.
        """
        freed = list(slots)
        with self._lock:
            self._check_used(freed)
            if len(set(freed)) != len(freed):
                raise ValueError(f"a slot is freed twice: {sorted(freed)}")
            moving = [slot for slot in freed if slot in self._moving]
            self._allocation.free(slot for slot in freed if slot not in self._moving)
            self._leaving.update(moving)

    def load(
        self, host_slots: PerPool, device_slots: Sequence[int], *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """L2 → L1, layer by layer, into allocated slots: see `LayerCopier.load`.

        Raises:
            ValueError: A slot that is not in use, or is named twice; or lists that do not match.
            RuntimeError: The pool was closed.
        """
        return self._move(
            device_slots, lambda: self._copier.load(host_slots, device_slots, indices=indices)
        )

    def store(
        self, device_slots: Sequence[int], host_slots: PerPool, *, indices: PerPool | None = None
    ) -> LayerTransfer:
        """L1 → L2, layer by layer, from allocated slots: see `LayerCopier.store`.

        Raises:
            ValueError: A slot that is not in use, or is named twice; or lists that do not match.
            RuntimeError: The pool was closed.
        """
        return self._move(
            device_slots, lambda: self._copier.store(device_slots, host_slots, indices=indices)
        )

    def close(self, timeout_s: float = 10.0) -> bool:
        """Let the transfers that were begun end, and the threads; False where that takes longer.

        Idempotent. The tensors are the caller's.
        """
        return self._copier.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, slots: Sequence[int], begin: Callable[[], LayerTransfer]) -> LayerTransfer:
        held = list(slots)
        with self._lock:
            self._check_used(held)
            self._moving.update(held)
        try:
            transfer = begin()
        except BaseException:
            self._moved(held)
            raise
        transfer.settled.add_done_callback(lambda _: self._moved(held))
        return transfer

    def _moved(self, slots: list[int]) -> None:
        with self._lock:
            self._moving -= Counter(slots)
            gone = {slot for slot in slots if slot in self._leaving and slot not in self._moving}
            self._leaving -= gone
            self._allocation.free(gone)

    def _check_used(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self._leaving or not self._allocation.is_used(slot):
                raise ValueError(
                    f"device slot {slot} is not in use: it was freed, or never allocated"
                )
