"""Limit how many pages of L2 prefetches may hold."""

from __future__ import annotations

import threading


class PrefetchQuota:
    """Counts the pages of L2 that unfinished prefetches hold or are about to load. Thread-safe.

    A prefetch is admitted as a whole while the others are below the limit, so a prefetch larger than the
    limit is served, too. The rule is that of SGLang's `prefetch_capacity_limit`.
    """

    def __init__(self, limit_pages: float) -> None:
        self._limit_pages = limit_pages
        self.pages: int = 0
        """How many pages are acquired now."""
        self._lock = threading.Lock()

    def acquire(self, pages: int) -> bool:
        """Admit a prefetch of `pages` pages, or return False. Call `release` when it ends."""
        with self._lock:
            if self.pages and self.pages >= self._limit_pages:
                return False
            self.pages += pages
            return True

    def release(self, pages: int) -> None:
        """Give acquired pages back."""
        with self._lock:
            self.pages -= pages
