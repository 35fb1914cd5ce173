"""Compute the bandwidth that a trace needs, from the arrival times and bytes of its requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.planning.stack_distances import Integers
    from hicache_storage.replay.trace import Request

WINDOWS_S = (1, 60)
_MOST_POINTS = 10_000
_MAX_DURATION_S = 366 * 86_400


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival times of requests, in seconds after the first request."""

    times_s: tuple[float, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Arrivals:
        """Return the arrivals of a trace.

        Raises:
            ConfigError: The trace is longer than a year. Its times are probably not milliseconds.
        """
        duration_s = requests[-1].arrival_s - requests[0].arrival_s
        if duration_s > _MAX_DURATION_S:
            raise ConfigError(
                f"the trace lasts {duration_s / 86_400:,.0f} days, but a plan covers at most 366:"
                " its timestamps must be milliseconds"
            )
        return cls(tuple(request.arrival_s - requests[0].arrival_s for request in requests))

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last, at least one window."""
        return max(self.times_s[-1], float(WINDOWS_S[0]))

    def figures(self, requests: Integers, nbytes: float) -> dict[str, float]:
        """Return the bytes and bandwidths of transfers of `nbytes` each, when these requests arrive.

        `requests` has the number of a request for each transfer. Percentiles are taken over all windows
        of the trace, including windows without a transfer.
        """
        figures = {
            "nbytes": len(requests) * nbytes,
            "mean_bytes_per_s": len(requests) * nbytes / self.duration_s,
        }
        for window_s in WINDOWS_S:
            _, counts = np.unique(self._windows(requests, window_s), return_counts=True)
            all_windows = int(self.times_s[-1] // window_s) + 1
            rank = -(-all_windows * 99 // 100) - (all_windows - len(counts))
            p99 = int(np.sort(counts)[rank - 1]) if rank > 0 else 0
            figures[f"p99_{window_s}s_bytes_per_s"] = p99 * nbytes / window_s
            figures[f"max_{window_s}s_bytes_per_s"] = int(counts.max(initial=0)) * nbytes / window_s
        return figures

    def series(self, requests: Integers, nbytes: float) -> list[list[float]]:
        """Return (seconds, bytes per second) for each minute, or for longer windows of a long trace."""
        window_s = 60 * (1 + int(self.times_s[-1] // (60 * _MOST_POINTS)))
        counts = np.bincount(
            self._windows(requests, window_s), minlength=int(self.times_s[-1] // window_s) + 1
        )
        return [
            [number * window_s, int(count) * nbytes / window_s]
            for number, count in enumerate(counts)
        ]

    def _windows(self, requests: Integers, window_s: int) -> Integers:
        return (np.array(self.times_s)[requests] // window_s).astype(np.int64)
