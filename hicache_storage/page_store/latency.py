"""How long a store takes for a page, as seen so far: whether a second thread is worth its while."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace

# Threads wake each other, wait for the interpreter's lock, and meet again in the store's own locks: a
# block pays where it keeps the store busy for longer than this. Measured with benchmarks/file.py, where
# two threads are slower than one for pages of 64 KiB and quicker from 1 MiB on.
_WORTH_A_THREAD_S = 0.006
# However quick the store is: so many bytes are moved and hashed outside of that lock.
_WORTH_A_THREAD_NBYTES = 8 << 20
# Until a store has been seen at work: a plain copy at 1 GB/s.
_FIRST_GUESS_S_PER_BYTE = 1e-9
_WEIGHT = 0.2


class LatencyEstimator:
    """Seconds a page of each key space takes in one direction: a moving average.

    Threads may note at the same time; a lost note does no harm.
    """

    def __init__(self, *, first_guess_s: float | None = None) -> None:
        """Start with `first_guess_s` for any page; None: with what its copy would take."""
        self._first_guess_s = first_guess_s
        self._s_per_page: dict[KeySpace, float] = {}

    def note(self, space: KeySpace, pages: int, elapsed_s: float) -> None:
        """One storage call took `elapsed_s` for `pages` pages."""
        sample = elapsed_s / pages
        self._s_per_page[space] = sample * _WEIGHT + self.s_per_page(space) * (1 - _WEIGHT)

    def s_per_page(self, space: KeySpace) -> float:
        """What a page is expected to take."""
        known = self._s_per_page.get(space, self._first_guess_s)
        return space.stored_nbytes * _FIRST_GUESS_S_PER_BYTE if known is None else known

    def least_pages(self, space: KeySpace) -> int:
        """The smallest block that is worth a thread of its own, when bytes are moved."""
        most = -(-_WORTH_A_THREAD_NBYTES // space.stored_nbytes)
        return min(self.least_questions(space), most)

    def least_questions(self, space: KeySpace) -> int:
        """The same, when nothing is moved."""
        return max(1, round(_WORTH_A_THREAD_S / max(self.s_per_page(space), 1e-9)))
