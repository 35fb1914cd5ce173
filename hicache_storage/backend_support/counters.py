"""Named counters that several threads add to."""

from __future__ import annotations

import threading
from collections import Counter


class Counters:
    """Counts of events since the start, by name. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Add `count` to the counter `name`. A counter appears once something above zero is added."""
        if count:
            with self._lock:
                self._counts[name] += count

    def snapshot(self) -> dict[str, int]:
        """Return all counts that are not zero."""
        with self._lock:
            return dict(self._counts)
