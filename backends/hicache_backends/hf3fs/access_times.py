"""When pages were read: noted at once, told to the index in batches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_backends.hf3fs.index.base import Index
    from hicache_storage.backend_support.deadline import Deadline

_MOST = 4096
APART_NS = 1000
"""Between the pages of a batch: what a double, Redis's only number for this, still tells apart."""


class AccessTimes:
    """What this process has used and the index does not know of yet. Thread-safe."""

    def __init__(self, index: Index, interval_s: float) -> None:
        self._index = index
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._used: dict[tuple[str, str], int] = {}
        self._told_s = time.monotonic()

    def note(self, space_id: str, hashes: Iterable[str], deadline: Deadline) -> None:
        """Note a use just now; of the first page the latest, so that a prefix loses its tail first."""
        now_ns = time.time_ns()
        with self._lock:
            for index, page_hash in enumerate(hashes):
                self._used[space_id, page_hash] = now_ns - index * APART_NS
            due = len(self._used) >= _MOST or time.monotonic() > self._told_s + self._interval_s
        if due:
            self.tell(deadline)

    def tell(self, deadline: Deadline) -> None:
        """Tell the index. What cannot be told is forgotten: recency is no promise."""
        with self._lock:
            used, self._used = self._used, {}
            self._told_s = time.monotonic()
        if used:
            try:
                self._index.touch(used, deadline)
            except HiCacheError:
                return
