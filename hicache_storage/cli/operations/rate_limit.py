"""A limit on bytes a second that threads share."""

from __future__ import annotations

import threading
import time

from hicache_storage.durations import MAX_DURATION_S


class RateLimit:
    """Delays its callers so that together they move at most so many bytes a second. Thread-safe."""

    def __init__(self, nbytes_per_s: float | None) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._lock = threading.Lock()
        self.stopped: threading.Event = threading.Event()
        """An event that ends all waits. A thread that waits for something else may use it, too."""
        self._free_at_s = time.monotonic()

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` may be moved. Return at once after `stop`, and without a limit."""
        if self._nbytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + nbytes / self._nbytes_per_s
        self.stopped.wait(min(begin_s - now_s, MAX_DURATION_S))

    def stop(self) -> None:
        """End all waits."""
        self.stopped.set()
