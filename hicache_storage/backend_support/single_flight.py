"""Run a call that may hang in its own thread, one at a time. All callers share its result."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """A call that runs in its own thread while callers wait with time limits. Thread-safe.

    A call that hangs occupies one thread, however many callers there are. The thread is a daemon, so it
    does not block the interpreter's exit. An object belongs to one process, because a forked child has
    none of its parent's threads.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._name = name
        self._call = call
        self._lock = threading.Lock()
        self._flight: Future[T] | None = None
        self._began_s = 0.0

    def age_s(self) -> float:
        """Return how many seconds the call in flight has run. 0.0 if there is none."""
        with self._lock:
            return 0.0 if self._flight is None else time.monotonic() - self._began_s

    def begin(self) -> Future[T]:
        """Return the call in flight. Begin a call if none is in flight.

        Raises:
            StorageUnavailable: The system cannot start a thread for the call.
        """
        with self._lock:
            if self._flight is None:
                flight = Future[T]()
                thread = threading.Thread(
                    target=self._run, args=(flight,), name=self._name, daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    raise StorageUnavailable(
                        f"{self._name}: the system cannot start a thread"
                    ) from None
                self._flight, self._began_s = flight, time.monotonic()
            return self._flight

    def wait(self, limit_s: float) -> Future[T] | None:
        """Return the call in flight once it has ended, or None if it still runs after `limit_s`.

        Raises:
            StorageUnavailable: The system cannot start a thread for the call.
        """
        flight = self.begin()
        return flight if wait([flight], limit_s).done else None

    def wait_idle(self, limit_s: float) -> None:
        """Wait at most `limit_s` for the end of the call in flight, if there is one."""
        with self._lock:
            flight = self._flight
        if flight is not None:
            wait([flight], limit_s)

    def _run(self, flight: Future[T]) -> None:
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - the waiting callers raise it
            self._clear()
            flight.set_exception(error)
        else:
            self._clear()
            flight.set_result(result)

    def _clear(self) -> None:
        with self._lock:
            self._flight = None
