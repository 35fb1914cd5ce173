"""Limit the bytes per second that threads move together."""

from __future__ import annotations

import threading
import time

from hicache_storage.durations import MAX_DURATION_S


class RateLimit:
    """A limit on the bytes per second that its callers move together. Thread-safe."""

    def __init__(self, nbytes_per_s: float | None) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._lock = threading.Lock()
        self.stopped: threading.Event = threading.Event()
        """An event that ends all waits. Threads that wait for something else may use it, too."""
        self._free_at_s = time.monotonic()

    def wait(self, nbytes: int) -> None:
        """Wait until `nbytes` may be moved. Return at once after `stop`, or if there is no limit."""
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
