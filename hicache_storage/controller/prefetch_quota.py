"""A limit on how many pages of L2 prefetches may hold."""

from __future__ import annotations

import threading


class PrefetchQuota:
    """A count of the L2 pages that unfinished prefetches hold or are about to load. Thread-safe.

    If the count is below the limit, a prefetch is admitted as a whole, even if it is larger than the
    limit. SGLang's `prefetch_capacity_limit` follows the same rule.
    """

    def __init__(self, limit_pages: float) -> None:
        self._limit_pages = limit_pages
        self.pages: int = 0
        """How many pages are acquired and not yet released."""
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
