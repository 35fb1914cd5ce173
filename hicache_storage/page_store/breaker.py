"""Circuit breakers: a store that keeps failing gets no calls for a while, then one call as a probe."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Self

STATES = ("closed", "half_open", "open")
"""The states of a breaker, from best to worst."""


class Permit:
    """The breaker's permission for one call.

    Only the first `succeed`, `fail` or `dismiss` counts. Used as a context manager, a permit dismisses
    itself if an exception leaves the block, because an interrupted probe says nothing about the store.
    Another probe may then follow.
    """

    __slots__ = ("_breaker", "_ended", "_generation", "is_probe")

    def __init__(self, breaker: CircuitBreaker, generation: int, *, is_probe: bool = False) -> None:
        self.is_probe: bool = is_probe
        self._breaker = breaker
        self._generation = generation
        self._ended = False

    def succeed(self) -> None:
        """Report that the store worked, with a hit or a miss."""
        self._breaker.conclude(self, succeeded=True)

    def fail(self, *, hung: bool = False) -> None:
        """Report that the store failed. With `hung`, this one failure opens the breaker."""
        self._breaker.conclude(self, succeeded=False, hung=hung)

    def dismiss(self) -> None:
        """Report that the call never reached the store."""
        self._breaker.conclude(self, succeeded=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, interrupted: type[BaseException] | None, *_: object) -> None:
        if interrupted is not None:
            self.dismiss()

    def end(self, generation: int) -> bool | None:
        """Mark the permit as ended. The caller holds the breaker's lock.

        Return whether the permit belongs to this `generation`, or None if it had ended before.
        """
        if self._ended:
            return None
        self._ended = True
        return self._generation == generation


class CircuitBreaker:
    """A breaker that opens after `failures` failed calls in a row, or after one that hung. Thread-safe.

    An open breaker refuses every call at once. After `cooldown_s` it admits one call as a probe. If the
    probe succeeds, the breaker closes; if it fails, the cool-down starts again. The breaker ignores
    reports on calls that it admitted before it last opened, because that outage is already counted.
    """

    def __init__(self, *, failures: int, cooldown_s: float) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at_s: float | None = None
        self._probe: Permit | None = None
        self._times_opened = 0

    @property
    def state(self) -> str:
        """`closed`, `open`, or `half_open` if a probe is running or the next call will be a probe."""
        with self._lock:
            if self._opened_at_s is None:
                return "closed"
            return "half_open" if self._probe is not None or self._cooled() else "open"

    @property
    def times_opened(self) -> int:
        """How often the breaker has opened."""
        return self._times_opened

    def admit(self) -> Permit | None:
        """Return a permit, which the call must end, or None if the breaker refuses the call."""
        with self._lock:
            if self._opened_at_s is None:
                return Permit(self, self._times_opened)
            if self._probe is not None or not self._cooled():
                return None
            self._probe = Permit(self, self._times_opened, is_probe=True)
            return self._probe

    def record(self, *, succeeded: bool) -> None:
        """Count the result of a call that did not ask for a permit."""
        with self._lock:
            self._count(succeeded=succeeded)

    def conclude(self, permit: Permit, *, succeeded: bool | None, hung: bool = False) -> None:
        """End `permit`. With `succeeded=None` the result does not count."""
        with self._lock:
            current = permit.end(self._times_opened)
            if current is None:
                return
            if permit is self._probe:
                self._probe = None
            elif not current or self._opened_at_s is not None:
                return
            if succeeded is not None:
                self._count(succeeded=succeeded, hung=hung)

    def _count(self, *, succeeded: bool, hung: bool = False) -> None:
        if succeeded:
            self._failures = 0
            self._opened_at_s = None
        elif self._opened_at_s is not None:
            self._opened_at_s = time.monotonic()
        else:
            self._failures += self._limit if hung else 1
            if self._failures >= self._limit:
                self._opened_at_s = time.monotonic()
                self._times_opened += 1

    def _cooled(self) -> bool:
        return (
            self._opened_at_s is not None
            and time.monotonic() - self._opened_at_s >= self._cooldown_s
        )


@dataclass(frozen=True, slots=True)
class Breakers:
    """The two breakers of a page store. If only writes fail, reads go on, and the reverse."""

    reads: CircuitBreaker
    writes: CircuitBreaker

    @property
    def state(self) -> str:
        """The worse of the two states: `open`, then `half_open`, then `closed`."""
        return max(self.reads.state, self.writes.state, key=STATES.index)

    @property
    def times_opened(self) -> int:
        """How often the two breakers have opened, together."""
        return self.reads.times_opened + self.writes.times_opened

    def record(self, *, succeeded: bool) -> None:
        """Count in both breakers the result of a call that did not ask for a permit."""
        self.reads.record(succeeded=succeeded)
        self.writes.record(succeeded=succeeded)
