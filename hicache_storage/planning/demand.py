"""Bandwidth that a trace needs: bytes by the arrival of the requests that move them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_storage.replay.report import percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.planning.stack_distances import Integers
    from hicache_storage.replay.trace import Request

WINDOWS_S = (1, 60)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrival of each request, in seconds since the first one."""

    times_s: tuple[float, ...]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Arrivals:
        """Return the arrivals of a trace."""
        return cls(tuple(request.arrival_s - requests[0].arrival_s for request in requests))

    @property
    def duration_s(self) -> float:
        """Seconds from the first request to the last; at least one window."""
        return max(self.times_s[-1], float(WINDOWS_S[0]))

    def figures(self, requests: Integers, nbytes: float) -> dict[str, float]:
        """Return the bytes and bandwidths of transfers of `nbytes` each, one for each request number.

        A percentile is taken over all windows of the trace, those without a transfer included.
        """
        figures = {
            "nbytes": len(requests) * nbytes,
            "mean_bytes_per_s": len(requests) * nbytes / self.duration_s,
        }
        for window_s in WINDOWS_S:
            counts = self._counts(requests, window_s)
            p99 = percentile(counts, 99) or 0.0
            figures[f"p99_{window_s}s_bytes_per_s"] = p99 * nbytes / window_s
            figures[f"max_{window_s}s_bytes_per_s"] = max(counts) * nbytes / window_s
        return figures

    def series(self, requests: Integers, nbytes: float, window_s: int) -> list[list[float]]:
        """Return (seconds, bytes per second) for each window."""
        counts = self._counts(requests, window_s)
        return [
            [number * window_s, count * nbytes / window_s] for number, count in enumerate(counts)
        ]

    def _counts(self, requests: Integers, window_s: int) -> list[float]:
        windows = (np.array(self.times_s) // window_s).astype(np.int64)
        counts = np.bincount(windows[requests], minlength=int(windows[-1]) + 1)
        return [float(count) for count in counts]
