"""Give one call one deadline, however many steps it takes."""

from __future__ import annotations

import time

from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.errors import StorageTimeout


class Deadline:
    """The time at which a call must end. Each call makes one deadline, and passes it to every step.

    A step that waits takes `remaining_s()` as its limit. If a signal interrupts a wait, the step
    calls `remaining_s` again and gets the time that is left, so signals never lengthen a call
    (KV-304). A limit too long for a lock, such as infinity, counts as `MAX_DURATION_S`. Thread-safe.
    """

    __slots__ = ("end_s", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s: float = min(timeout_s, MAX_DURATION_S)
        self.end_s: float = time.monotonic() + self.timeout_s
        """The time of `time.monotonic` at which the call must end."""

    def remaining_s(self) -> float:
        """Return the seconds that are left. 0.0 if the deadline has passed."""
        return max(0.0, self.end_s - time.monotonic())

    def passed(self) -> bool:
        """Return True if no time is left."""
        return self.remaining_s() == 0.0

    def expire(self) -> None:
        """Leave no time. A step that waits already keeps the limit that it took."""
        self.end_s = min(self.end_s, time.monotonic())

    def check(self, step: str) -> None:
        """Raise if no time is left for `step`, a noun phrase such as "the name look-up".

        Raises:
            StorageTimeout: The deadline has passed. The message names the step and the time limit.
        """
        if self.passed():
            raise StorageTimeout(f"{step} did not end within {self.timeout_s:g} s")
