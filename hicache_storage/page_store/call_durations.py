"""Histograms of how long the calls of a page store took, by operation and verdict."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

Operation: TypeAlias = Literal["match", "load", "save"]

OPERATIONS: tuple[Operation, ...] = ("match", "load", "save")
BUCKETS_S: tuple[float, ...] = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The upper limits of the buckets. Longer calls count in one more bucket."""

_SEVERITY = {
    verdict: number
    for number, verdict in enumerate(
        (
            Verdict.OK,
            Verdict.NOT_ADMITTED,
            Verdict.MISS,
            Verdict.REFUSED,
            Verdict.WRONG_SIZE,
            Verdict.WRONG_KEY,
            Verdict.CORRUPT,
            Verdict.PART_UNAVAILABLE,
            Verdict.BREAKER_OPEN,
            Verdict.TIMEOUT,
            Verdict.UNAVAILABLE,
            Verdict.ERROR,
        )
    )
}


@dataclass(frozen=True, slots=True)
class Histogram:
    """The durations of the calls of one operation that ended with one verdict."""

    counts: tuple[int, ...]
    """The number of calls in each bucket, not cumulative: one number more than `BUCKETS_S`."""
    total_s: float
    """The time of all calls together."""


class CallDurations:
    """Histograms of call durations. A call adds to one bucket, for any number of pages. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[Operation, Verdict], list[int]] = {}
        self._total_s: dict[tuple[Operation, Verdict], float] = {}

    def note(self, operation: Operation, verdicts: Collection[Verdict], elapsed_s: float) -> None:
        """Count a call under the worst of its pages' `verdicts`. A call without pages does not count."""
        if not verdicts:
            return
        key = (operation, max(verdicts, key=_SEVERITY.__getitem__))
        bucket = bisect_left(BUCKETS_S, elapsed_s)
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(BUCKETS_S) + 1))
            counts[bucket] += 1
            self._total_s[key] = self._total_s.get(key, 0.0) + elapsed_s

    def snapshot(self) -> Mapping[tuple[Operation, Verdict], Histogram]:
        """Return a histogram for each operation and verdict that has occurred."""
        with self._lock:
            return {
                key: Histogram(tuple(counts), self._total_s[key])
                for key, counts in self._counts.items()
            }
