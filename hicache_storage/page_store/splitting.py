"""Decide into how many storage calls a batch is split, from the time that earlier calls took."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.keys import KeySpace

# Threads wake each other, wait for the interpreter's lock, and meet again in the store's own locks:
# a second thread pays off if its pages keep the store busy for longer than this. Measured with
# benchmarks/file.py: two threads are slower than one for pages of 64 KiB, and faster from 1 MiB on.
_MIN_THREAD_S = 0.006
# A thread moves and hashes this many bytes outside of the interpreter's lock, however fast the
# store is.
_MIN_THREAD_NBYTES = 8 << 20
# The first estimate of a transfer: a plain copy at 1 GB/s.
_FIRST_ESTIMATE_S_PER_BYTE = 1e-9
_WEIGHT = 0.2
# A limit, because clients choose the number of key spaces by their salts. Estimates that are dropped
# are soon learned again.
_MOST_ESTIMATES = 4096


class LatencyEstimator:
    """A moving average, for each key space, of the seconds that one kind of call takes for a page.

    Threads may call `note` at the same time. A lost sample does no harm.
    """

    def __init__(self, *, first_estimate_s: float | None = None) -> None:
        """Start with `first_estimate_s` for any page. None: start with the time to copy it."""
        self._first_estimate_s = first_estimate_s
        self._s_per_page: dict[KeySpace, float] = {}

    def note(self, space: KeySpace, pages: int, elapsed_s: float) -> None:
        """Add a sample: one storage call took `elapsed_s` for `pages` pages."""
        sample = elapsed_s / pages
        self._s_per_page[space] = sample * _WEIGHT + self.s_per_page(space) * (1 - _WEIGHT)
        if len(self._s_per_page) > _MOST_ESTIMATES:
            self._s_per_page.clear()

    def s_per_page(self, space: KeySpace) -> float:
        """Return the estimate for one page."""
        estimate = self._s_per_page.get(space, self._first_estimate_s)
        return space.stored_nbytes * _FIRST_ESTIMATE_S_PER_BYTE if estimate is None else estimate

    def min_transfer_pages(self, space: KeySpace) -> int:
        """Return the smallest number of pages for which a transfer gets another thread."""
        by_nbytes = -(-_MIN_THREAD_NBYTES // space.stored_nbytes)
        return min(self.min_exists_pages(space), by_nbytes)

    def min_exists_pages(self, space: KeySpace) -> int:
        """Return the smallest number of pages for which an exists query gets another thread."""
        return max(1, round(_MIN_THREAD_S / max(self.s_per_page(space), 1e-9)))


def piece_count(pages: int, *, threads: int, least: int, most: int) -> int:
    """Return how many pieces of at most `most` pages to make: a multiple of the threads that are used.

    Each of these threads gets at least `least` pages.
    """
    threads = min(threads, max(1, pages // least))
    return min(pages, threads * -(-pages // (threads * most)))


def even_cuts(length: int, pieces: int) -> Iterator[slice]:
    """Yield `pieces` slices that cover `length`, as equal as possible."""
    ends = [length * number // pieces for number in range(pieces + 1)] if pieces else []
    return (slice(start, end) for start, end in pairwise(ends))
