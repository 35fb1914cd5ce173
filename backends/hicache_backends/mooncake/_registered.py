"""Host memory that is registered with the client, and what lies outside it."""

from __future__ import annotations

import bisect
import threading


class Registered:
    """Address ranges, none overlapping another. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, nbytes: int) -> bool:
        """Take a range in; False where it overlaps one that is there."""
        with self._lock:
            place = bisect.bisect_right(self._starts, start)
            after = self._starts[place] if place < len(self._starts) else start + nbytes
            if (place and self._ends[place - 1] > start) or after < start + nbytes:
                return False
            self._starts.insert(place, start)
            self._ends.insert(place, start + nbytes)
            return True

    def remove(self, start: int) -> bool:
        """Let go the range that begins at `start`; False where there is none."""
        with self._lock:
            place = bisect.bisect_left(self._starts, start)
            if place == len(self._starts) or self._starts[place] != start:
                return False
            del self._starts[place], self._ends[place]
            return True

    def holds(self, addresses: tuple[tuple[int, int], ...]) -> bool:
        """Whether each (address, nbytes) lies inside one range."""
        with self._lock:
            for start, nbytes in addresses:
                place = bisect.bisect_right(self._starts, start)
                if not place or self._ends[place - 1] < start + nbytes:
                    return False
            return bool(addresses)

    def starts(self) -> list[int]:
        """Where each range begins."""
        with self._lock:
            return list(self._starts)
