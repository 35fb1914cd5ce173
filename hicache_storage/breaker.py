"""A circuit breaker: a store that keeps failing is left alone for a while, then tried with one call."""

from __future__ import annotations

import threading
import time


class CircuitBreaker:
    """Opens after `failures` calls failed in a row; after `cooldown_s` one call may probe.

    While it is open every call is turned away at once. A probe that succeeds closes it, one that fails
    starts the cool-down again. Thread-safe.
    """

    def __init__(self, *, failures: int, cooldown_s: float) -> None:
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at_s: float | None = None
        self._probing = False
        self._times_opened = 0

    @property
    def state(self) -> str:
        """`closed`, `open` or `half_open` (a probe is running, or is let through next)."""
        with self._lock:
            if self._opened_at_s is None:
                return "closed"
            return "half_open" if self._probing or self._cooled() else "open"

    @property
    def times_opened(self) -> int:
        """How often it went from closed to open."""
        return self._times_opened

    def admit(self) -> bool:
        """Whether a call may go ahead; each admitted call ends in one `record`, or one `dismiss`."""
        with self._lock:
            if self._opened_at_s is None:
                return True
            if self._probing or not self._cooled():
                return False
            self._probing = True
            return True

    def record(self, *, succeeded: bool) -> None:
        """The end of an admitted call: did the store do its work, hit or miss?"""
        with self._lock:
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
            self._probing = False

    def dismiss(self) -> None:
        """The end of an admitted call that tells nothing: its caller was less patient than the store's
        own timeout."""
        with self._lock:
            self._probing = False

    def _cooled(self) -> bool:
        return (
            self._opened_at_s is not None
            and time.monotonic() - self._opened_at_s >= self._cooldown_s
        )
