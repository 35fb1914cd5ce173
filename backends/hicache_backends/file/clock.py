"""The clock of a root, by which pages age: the file system's own clock, which all hosts share."""

from __future__ import annotations

import math
import os
import time

MOST_AHEAD_NS = 300 * 10**9
"""A page whose time is further ahead than this has no known time, and counts as the oldest one.

The data plane has the same value: it renews such a time, however short `touch_interval_s` is.
"""
_MEASURE_INTERVAL_S = 1.0
# Two clocks that differ by less are the same clock: some file systems only store whole seconds.
_SAME_CLOCK_NS = 2 * 10**9
_STEP_NS = 10_000


class RootClock:
    """A clock for one root. Thread-safe, because an outdated value does no harm.

    `path` is a file of the root. About once a second, the file system sets its time, which shows
    how far the clocks of this host and of the file system (a server, for NFS) are apart. A step back
    of up to `MOST_AHEAD_NS` changes no order: new times follow the newest one that was seen.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offset_ns = 0
        self._next_measurement_s = -math.inf
        self._newest_ns = 0

    def now_ns(self) -> int:
        """Return the time of a use that happens now: later than all uses that were seen."""
        now_s = time.monotonic()
        if now_s >= self._next_measurement_s:
            self._next_measurement_s = now_s + _MEASURE_INTERVAL_S
            self._measure()
        now_ns = time.time_ns() + self._offset_ns
        if now_ns <= self._newest_ns <= now_ns + MOST_AHEAD_NS:
            now_ns = self._newest_ns + _STEP_NS
        self._newest_ns = now_ns
        return now_ns

    def latest_ns(self) -> int:
        """Return the latest time that a page may have. Later ones are not known times."""
        return time.time_ns() + self._offset_ns + MOST_AHEAD_NS

    def note_used(self, used_ns: int) -> None:
        """Note the known time of a page, so that new times are later."""
        self._newest_ns = max(self._newest_ns, used_ns)

    def _measure(self) -> None:
        try:
            os.utime(self._path, follow_symlinks=False)  # without a time: the file system's own one
            set_ns = os.stat(self._path, follow_symlinks=False).st_mtime_ns
        except OSError:
            return
        offset_ns = set_ns - time.time_ns()
        self._offset_ns = offset_ns if abs(offset_ns) > _SAME_CLOCK_NS else 0
