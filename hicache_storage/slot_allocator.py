"""An allocator of numbered slots for pages."""

from __future__ import annotations

import operator
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class SlotAllocator:
    """The slots 0 to `count` - 1, all free at first. Thread-safe."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._free = deque(range(count))
        self._used = bytearray(count)

    @property
    def free_count(self) -> int:
        """The number of slots that `allocate` could return."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` slots, or None if fewer are free. Slots that were freed first are used first.

        Raises:
            ValueError: The count is negative.
        """
        if count < 0:
            raise ValueError(f"count must be at least 0, not {count}")
        with self._lock:
            if count > len(self._free):
                return None
            slots = [self._free.popleft() for _ in range(count)]
            for slot in slots:
                self._used[slot] = 1
            return slots

    def free(self, slots: Iterable[int]) -> None:
        """Free slots.

        Raises:
            ValueError: A slot is not in use, or is named twice. No slot is freed then.
        """
        freed = [operator.index(slot) for slot in slots]
        with self._lock:
            for number, slot in enumerate(freed):
                if not self.is_used(slot):
                    for earlier in freed[:number]:
                        self._used[earlier] = 1
                    raise ValueError(f"slot {slot} is not in use: freed twice, or never allocated")
                self._used[slot] = 0
            self._free.extend(freed)

    def is_used(self, slot: int) -> bool:
        """Return True if `slot` was allocated, and not freed since."""
        return 0 <= slot < self.count and bool(self._used[slot])
