"""Count latencies in buckets: percentiles are right to within half a percent, in little memory."""

from __future__ import annotations

import math
from collections import Counter

_LEAST_S = 1e-7
_WIDTH = math.log(1.01)
_MOST_ONE_IN = 1000.0
_CURVE_STEPS = 40


class Latencies:
    """The latencies of calls, counted in buckets that are 1 % wide. Not thread-safe."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()

    @property
    def count(self) -> int:
        """How many latencies were counted."""
        return self._buckets.total()

    def add(self, seconds: float) -> None:
        """Count one latency."""
        self._buckets[math.floor(math.log(max(seconds, _LEAST_S)) / _WIDTH)] += 1

    def merge(self, other: Latencies) -> None:
        """Add all latencies of `other`."""
        self._buckets.update(other._buckets)

    def quantile(self, share: float) -> float | None:
        """Return the latency that this share of the calls did not exceed. None without calls."""
        rank = max(1, math.ceil(share * self.count))
        for bucket in sorted(self._buckets):
            rank -= self._buckets[bucket]
            if rank <= 0:
                return math.exp((bucket + 0.5) * _WIDTH)
        return None

    def curve(self) -> list[tuple[float, float]]:
        """Return points (n, latency that one call in n exceeds), with n from 1 to 1000."""
        most = min(_MOST_ONE_IN, self.count)
        points: list[tuple[float, float]] = []
        for step in range(_CURVE_STEPS + 1):
            one_in = _MOST_ONE_IN ** (step / _CURVE_STEPS)
            latency_s = self.quantile(1 - 1 / one_in)
            if latency_s is not None and (one_in <= most or not points):
                points.append((one_in, latency_s))
        return points
