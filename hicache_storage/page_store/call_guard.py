"""Guard a store with a breaker, and notice calls that run for too long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_storage.page_store.breaker import CircuitBreaker

if TYPE_CHECKING:
    from hicache_storage.page_store.breaker import Permit


class RunningCall:
    """A storage call that has begun and not ended."""

    __slots__ = ("began_s", "permit")

    def __init__(self, began_s: float, permit: Permit | None) -> None:
        self.began_s: float = began_s
        self.permit: Permit | None = permit


class CallGuard:
    """A breaker, and the calls behind it. One that runs longer than `timeout_s` has failed. Thread-safe.

    The breaker records such a failure when the call ends, or when the next call asks for a permit.
    """

    def __init__(self, *, timeout_s: float, failures: int, cooldown_s: float) -> None:
        self.breaker: CircuitBreaker = CircuitBreaker(failures=failures, cooldown_s=cooldown_s)
        self.timeout_s: float = timeout_s
        self._lock = threading.Lock()
        self._running: set[RunningCall] = set()

    @property
    def running_count(self) -> int:
        """The number of calls that have begun and not ended."""
        return len(self._running)

    def admit(self) -> Permit | None:
        """Return a permit for a call, or None if the breaker refuses it."""
        for call in self.overdue():
            if call.permit is not None:
                call.permit.fail()
        return self.breaker.admit()

    def begin(self, permit: Permit | None) -> RunningCall:
        """Note that a call begins. Pass the result to `end`."""
        call = RunningCall(time.monotonic(), permit)
        with self._lock:
            self._running.add(call)
        return call

    def end(self, call: RunningCall) -> None:
        """Note that a call has ended. It has failed if it is overdue."""
        with self._lock:
            self._running.discard(call)
        if call.permit is not None and self._is_overdue(call):
            call.permit.fail()

    def of(self, permit: Permit) -> list[RunningCall]:
        """Return the running calls of `permit`."""
        with self._lock:
            return [call for call in self._running if call.permit is permit]

    def overdue(self) -> list[RunningCall]:
        """Return the calls that have run for longer than `timeout_s`."""
        if not self._running:
            return []
        with self._lock:
            return [call for call in self._running if self._is_overdue(call)]

    def _is_overdue(self, call: RunningCall) -> bool:
        return time.monotonic() - call.began_s > self.timeout_s
