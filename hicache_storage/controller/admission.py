"""What keeps prefetches from taking all of L2, and all of the store."""

from __future__ import annotations

import threading
import time


class PrefetchQuota:
    """Pages of L2 that unfinished prefetches hold or are about to. Thread-safe.

    A prefetch is let in whole as long as the others leave any of the limit, so that one that is larger
    than the limit is served too. Source of the rule: SGLang's `prefetch_capacity_limit`.
    """

    def __init__(self, limit_pages: float) -> None:
        self._limit_pages = limit_pages
        self._pages = 0
        self._lock = threading.Lock()

    @property
    def pages(self) -> int:
        """How many there are now."""
        return self._pages

    def enter(self, pages: int) -> bool:
        """Whether another prefetch may bring `pages` pages; then `leave` follows."""
        with self._lock:
            if self._pages and self._pages >= self._limit_pages:
                return False
            self._pages += pages
            return True

    def leave(self, pages: int) -> None:
        """The end of `enter`."""
        with self._lock:
            self._pages -= pages


class InFlight:
    """Bytes of reads that the store has not answered yet, whether or not somebody waits for them."""

    def __init__(self, limit_nbytes: int | None) -> None:
        self._limit_nbytes = limit_nbytes
        self._nbytes = 0
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """How many there are now."""
        return self._nbytes

    def fitting(self, pages: int, page_nbytes: int) -> int:
        """How many of `pages` pages one read may be made of: at least one."""
        if self._limit_nbytes is None:
            return pages
        return max(1, min(pages, self._limit_nbytes // page_nbytes))

    def enter(self, nbytes: int, timeout_s: float) -> bool:
        """Wait for room for `nbytes`; False where none came. A read alone always has room."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._has_room(nbytes):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            self._nbytes += nbytes
            return True

    def leave(self, nbytes: int) -> None:
        """The end of `enter`: the store touches these bytes no more."""
        with self._changed:
            self._nbytes -= nbytes
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        limit = self._limit_nbytes
        return limit is None or not self._nbytes or self._nbytes + nbytes <= limit
