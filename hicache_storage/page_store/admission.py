"""Admission of writes: which pages are offered to the storage at all.

A page that no request uses again costs a write and space in the storage. Two rules keep such pages out:

    second use   a page is written when it is offered for the second time. A sketch of fixed size
                 remembers the first time.
    rate         a token bucket limits the bytes that are written. The first pages of a batch get the
                 tokens, because every longer prefix needs them too.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_storage.backend_support.counters import Counters
from hicache_storage.page_store.sketch import FILTERS, PageSketch
from hicache_storage.settings import ByteSize, Field, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOT_ADMITTED_FIRST_USE = "not_admitted_first_use"
"""The counter of pages that were offered for the first time."""
NOT_ADMITTED_RATE = "not_admitted_rate"
"""The counter of pages that exceeded the rate."""

_BURST_S = 10.0


class AdmissionSettings(Settings):
    """The rules by which pages are admitted. By default, every page is admitted."""

    second_use: bool = False
    """Write a page only when it is offered for the second time."""
    remembered_pages: int = Field(default=1_000_000, ge=64, le=1_000_000_000)
    """How many of the last offered pages `second_use` remembers. Each takes 2.5 bytes of memory."""
    write_nbytes_per_s: ByteSize | None = Field(default=None, gt=0)
    """How many payload bytes this process may write a second, on average. None: no limit."""
    write_burst_nbytes: ByteSize | None = Field(default=None, gt=0)
    """How many bytes may be written at once after a pause. None: ten seconds' worth."""

    @property
    def is_enabled(self) -> bool:
        """True if a rule is set, so that a page may be refused."""
        return self.second_use or self.write_nbytes_per_s is not None


class TokenBucket:
    """A limit on bytes per second. Not thread-safe."""

    def __init__(
        self, nbytes_per_s: float, burst_nbytes: float, clock: Callable[[], float]
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._burst_nbytes = burst_nbytes
        self._clock = clock
        self._nbytes = burst_nbytes
        self._filled_s = clock()

    def take(self, pages: int, page_nbytes: int) -> int:
        """Take the tokens for as many of `pages` pages as possible. Return the number of these pages.

        A page larger than the burst needs a full bucket, which then takes longer to fill again.
        """
        now_s = self._clock()
        filled = self._nbytes + (now_s - self._filled_s) * self._nbytes_per_s
        self._nbytes, self._filled_s = min(self._burst_nbytes, filled), now_s
        if page_nbytes > self._burst_nbytes:
            taken = int(pages > 0 and self._nbytes >= self._burst_nbytes)
        else:
            taken = min(pages, max(0, int(self._nbytes // page_nbytes)))
        self._nbytes -= taken * page_nbytes
        return taken


class Admission:
    """The rules that decide which pages are offered to a storage. Thread-safe."""

    def __init__(
        self, settings: AdmissionSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with no page remembered. `clock` gives the time in seconds, for the rate."""
        self.settings = settings
        self._lock = threading.Lock()
        self._counters = Counters()
        self._sketch = PageSketch(settings.remembered_pages) if settings.second_use else None
        self._bucket: TokenBucket | None = None
        rate = settings.write_nbytes_per_s
        if rate is not None:
            burst = settings.write_burst_nbytes
            self._bucket = TokenBucket(rate, rate * _BURST_S if burst is None else burst, clock)

    def admit(
        self,
        hashes: Sequence[str],
        page_nbytes: int,
        *,
        group: str = "",
        used: Sequence[bool] | None = None,
    ) -> list[bool]:
        """Decide which pages of a batch are admitted, and count the others.

        Args:
            hashes: The pages, in the order of their prefix.
            page_nbytes: The payload bytes of one page.
            group: Pages of different groups are different pages, even if their hashes are equal.
            used: For each page, True if the caller has seen an earlier use of the page.
        """
        with self._lock:
            admitted = [True] * len(hashes)
            if self._sketch is not None:
                admitted = self._sketch.add(hashes, group)
                if used is not None:
                    admitted = [seen or known for seen, known in zip(admitted, used, strict=True)]
                self._counters.add(NOT_ADMITTED_FIRST_USE, admitted.count(False))
            if self._bucket is not None:
                wanted = admitted.count(True)
                taken = self._bucket.take(wanted, page_nbytes)
                self._counters.add(NOT_ADMITTED_RATE, wanted - taken)
                if taken < wanted:
                    admitted = _first(admitted, taken)
            return admitted

    def stats(self) -> dict[str, int]:
        """Return how many pages were not admitted, by reason."""
        return self._counters.snapshot()

    # --- the sketch's place in a store ---------------------------------------------------------------

    @property
    def stored_nbytes(self) -> int | None:
        """The size of each filter in the store, or None if there is no sketch to store."""
        return None if self._sketch is None else self._sketch.stored_nbytes

    def states(self) -> list[tuple[int, int]]:
        """Return the state of each filter, which differs after every change."""
        with self._lock:
            return self._states()

    def _states(self) -> list[tuple[int, int]]:
        return [] if self._sketch is None else [self._sketch.state(n) for n in range(FILTERS)]

    def dump(self, number: int) -> bytes:
        """Return a filter as bytes."""
        with self._lock:
            assert self._sketch is not None, "there is nothing to keep"
            return self._sketch.dump(number)

    def restore(self, dumps: Sequence[bytes]) -> tuple[int, list[tuple[int, int]]]:
        """Remember the pages of dumped filters, too.

        Returns:
            How many dumps were usable, and the states of the filters if they hold only what the dumps
            hold: no state if a page was remembered before.
        """
        with self._lock:
            if self._sketch is None:
                return 0, []
            was_empty = not any(count for _, count in self._states())
            return self._sketch.restore(dumps), self._states() if was_empty else []


def _first(wanted: Sequence[bool], count: int) -> list[bool]:
    """Return `wanted` with only its first `count` True values left."""
    chosen: list[bool] = []
    for each in wanted:
        chosen.append(each and count > 0)
        count -= each
    return chosen
