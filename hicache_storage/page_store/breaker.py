"""A circuit breaker: a store that keeps failing is left alone for a while, then tried with one call."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Self


class Admission:
    """One call that a breaker let through. Its first `succeed`, `fail` or `dismiss` counts, no other.

    As a context manager it dismisses what an exception leaves: a probe that was interrupted tells
    nothing, and another may follow.
    """

    __slots__ = ("_breaker", "_era", "_over")

    def __init__(self, breaker: CircuitBreaker, era: int) -> None:
        self._breaker = breaker
        self._era = era
        self._over = False

    def succeed(self) -> None:
        """Tell that the store did its work, hit or miss."""
        self._breaker.conclude(self, succeeded=True)

    def fail(self) -> None:
        """Tell that the store failed."""
        self._breaker.conclude(self, succeeded=False)

    def dismiss(self) -> None:
        """Tell that nothing was learned about the store: the call never reached it."""
        self._breaker.conclude(self, succeeded=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, interrupted: type[BaseException] | None, *_: object) -> None:
        if interrupted is not None:
            self.dismiss()

    def ends_in(self, era: int) -> bool | None:
        """Mark it as over, under the breaker's lock: did it begin in `era`? None: it was over."""
        if self._over:
            return None
        self._over = True
        return self._era == era


class CircuitBreaker:
    """Opens after `failures` calls failed in a row; after `cooldown_s` one call may probe.

    While it is open every call is turned away at once. A probe that succeeds closes it, one that fails
    starts the cool-down again. What calls tell that were admitted before it last opened is not heard:
    they tell of the outage that is known. Thread-safe.
    """

    def __init__(self, *, failures: int, cooldown_s: float) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at_s: float | None = None
        self._probe: Admission | None = None
        self._times_opened = 0

    @property
    def state(self) -> str:
        """`closed`, `open` or `half_open` (a probe is running, or is let through next)."""
        with self._lock:
            if self._opened_at_s is None:
                return "closed"
            return "half_open" if self._probe is not None or self._cooled() else "open"

    @property
    def times_opened(self) -> int:
        """How often it went from closed to open."""
        return self._times_opened

    def admit(self) -> Admission | None:
        """Let a call through, which then ends its admission; None: it is turned away."""
        with self._lock:
            if self._opened_at_s is None:
                return Admission(self, self._times_opened)
            if self._probe is not None or not self._cooled():
                return None
            self._probe = Admission(self, self._times_opened)
            return self._probe

    def record(self, *, succeeded: bool) -> None:
        """Tell of a call to the store that the breaker did not admit."""
        with self._lock:
            self._learn(succeeded=succeeded)

    def conclude(self, admission: Admission, *, succeeded: bool | None) -> None:
        """End `admission`. None: nothing was learned."""
        with self._lock:
            current = admission.ends_in(self._times_opened)
            if current is None:
                return
            if admission is self._probe:
                self._probe = None
            elif not current or self._opened_at_s is not None:
                return
            if succeeded is not None:
                self._learn(succeeded=succeeded)

    def _learn(self, *, succeeded: bool) -> None:
        if succeeded:
            self._failures = 0
            self._opened_at_s = None
        elif self._opened_at_s is not None:
            self._opened_at_s = time.monotonic()
        else:
            self._failures += 1
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
    """The breakers of a page store: a store that takes no writes is still read, and the reverse."""

    reads: CircuitBreaker
    writes: CircuitBreaker

    @property
    def state(self) -> str:
        """The worse of both states: `open`, then `half_open`, then `closed`."""
        return max(self.reads.state, self.writes.state, key=_SEVERITY.index)

    @property
    def times_opened(self) -> int:
        """How often either of them opened."""
        return self.reads.times_opened + self.writes.times_opened

    def record(self, *, succeeded: bool) -> None:
        """Tell both of a call to the store that neither admitted."""
        self.reads.record(succeeded=succeeded)
        self.writes.record(succeeded=succeeded)


_SEVERITY = ("closed", "half_open", "open")
