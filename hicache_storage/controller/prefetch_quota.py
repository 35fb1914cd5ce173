"""Quotas of prefetches: the pages of L2 that they hold, and the bytes that the store is reading."""

from __future__ import annotations

import threading


class PrefetchQuota:
    """Pages of L2 that unfinished prefetches hold or are about to load. Thread-safe.

    A prefetch is admitted as a whole while the others leave any of the limit, so that a prefetch larger
    than the limit is served too. Source of the rule: SGLang's `prefetch_capacity_limit`.
    """

    def __init__(self, limit_pages: float) -> None:
        self._limit_pages = limit_pages
        self.pages: int = 0
        """Pages that are acquired now."""
        self._lock = threading.Lock()

    def acquire(self, pages: int) -> bool:
        """Admit a prefetch of `pages` pages, to be followed by `release`; return False if refused."""
        with self._lock:
            if self.pages and self.pages >= self._limit_pages:
                return False
            self.pages += pages
            return True

    def release(self, pages: int) -> None:
        """Give acquired pages back."""
        with self._lock:
            self.pages -= pages


class InFlightReads:
    """Bytes of reads that the store has not answered yet, those of callers that gave up included."""

    def __init__(self, limit_nbytes: int | None) -> None:
        self._limit_nbytes = limit_nbytes
        self.nbytes: int = 0
        """Bytes that are in flight now."""
        self._changed = threading.Condition()

    def pages_per_read(self, pages: int, page_nbytes: int) -> int:
        """Return the number of pages, from 1 to `pages`, that one read may have."""
        if self._limit_nbytes is None:
            return pages
        return max(1, min(pages, self._limit_nbytes // page_nbytes))

    def acquire(self, nbytes: int, timeout_s: float) -> bool:
        """Wait until `nbytes` more may be read; return False at the timeout. A lone read always may."""
        with self._changed:
            fits = self._changed.wait_for(lambda: self._fits(nbytes), timeout_s)
            self.nbytes += nbytes if fits else 0
            return fits

    def release(self, nbytes: int) -> None:
        """End `acquire`. The store does not touch these bytes any more."""
        with self._changed:
            self.nbytes -= nbytes
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        limit = self._limit_nbytes
        return limit is None or not self.nbytes or self.nbytes + nbytes <= limit
