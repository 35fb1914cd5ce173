"""A call that may hang: at most one is in flight, on a thread of its own, and all share its answer."""

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
    """Runs one call beside its callers, who do not wait longer than they may. Thread-safe.

    A call that hangs keeps one thread, however many callers there are. The thread is a daemon: it blocks
    no exit of the interpreter. Of one process: a forked child has none of its parent's threads.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._name = name
        self._call = call
        self._lock = threading.Lock()
        self._flight: Future[T] | None = None
        self._began_s = 0.0

    def age_s(self) -> float:
        """Return for how long the call in flight has run; 0.0 where there is none."""
        with self._lock:
            return 0.0 if self._flight is None else time.monotonic() - self._began_s

    def begin(self) -> Future[T]:
        """Return the call in flight; begin one where there is none.

        Raises:
            StorageUnavailable: The system has no thread for it.
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
                    raise StorageUnavailable(f"{self._name}: the system has no thread") from None
                self._flight, self._began_s = flight, time.monotonic()
            return self._flight

    def ended(self, limit_s: float) -> Future[T] | None:
        """Return the call in flight once it has ended; None where it still runs after `limit_s`.

        Raises:
            StorageUnavailable: The system has no thread for it.
        """
        flight = self.begin()
        return flight if wait([flight], limit_s).done else None

    def wait(self, limit_s: float) -> None:
        """Wait for the call in flight, if there is one, but no longer than `limit_s`."""
        with self._lock:
            flight = self._flight
        if flight is not None:
            wait([flight], limit_s)

    def _run(self, flight: Future[T]) -> None:
        try:
            answer = self._call()
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            self._land()
            flight.set_exception(error)
        else:
            self._land()
            flight.set_result(answer)

    def _land(self) -> None:
        with self._lock:
            self._flight = None
