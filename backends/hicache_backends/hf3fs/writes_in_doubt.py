"""Slots whose write failed, and may be carried out later all the same."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.hf3fs.slots import Place

_MOST = 1024


class WritesInDoubt:
    """Slots that stay reserved, so that no other page gets one and a late write into it. Thread-safe.

    They stay so until the writer ends, or its lease. Of more than `_MOST` the oldest are reclaimed when
    a lease has passed; until then no more pages are taken, since they would evict all others.
    """

    def __init__(self, reclaim: Callable[[str, Sequence[Place]], None], lease_s: float) -> None:
        self._reclaim = reclaim
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._slots: deque[tuple[float, str, Place]] = deque()

    def add(self, space_id: str, places: Sequence[Place]) -> None:
        """Keep slots back."""
        now_s = time.monotonic()
        with self._lock:
            self._slots += [(now_s, space_id, place) for place in places]

    def is_full(self) -> bool:
        """Return True while there are too many for another write."""
        with self._lock:
            old_s = time.monotonic() - self._lease_s
            while len(self._slots) > _MOST and self._slots[0][0] < old_s:
                _, space_id, place = self._slots.popleft()
                self._reclaim(space_id, [place])
            return len(self._slots) > _MOST
