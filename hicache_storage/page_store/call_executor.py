"""One direction of a page store's traffic: its threads, its breaker, and what is known of its speed."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.backend_support.executor import DaemonExecutor, when_all_done
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable
from hicache_storage.page_store.latency import LatencyEstimator
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import Any

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page_store.breaker import Admission, CircuitBreaker
    from hicache_storage.page_store.state_log import StateLog

logger = logging.getLogger("hicache_storage.page_store")

T = TypeVar("T")

# Until a store has been asked: a look into a table, or a file's status.
_QUESTION_S = 2e-6


class NotTriedError(Exception):
    """The deadline had passed when a storage call was to begin. Tells nothing of the store."""


class CallExecutor:
    """Storage calls of one direction. Thread-safe.

    A storage call that runs for longer than `timeout_s` is a failure of the store, however little
    patience its caller had: the breaker hears of it when the call ends, or when the next caller comes.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        timeout_s: float,
        breaker: CircuitBreaker,
        state: StateLog,
    ) -> None:
        self.threads = threads
        self.breaker = breaker
        self.state = state
        self.pace = LatencyEstimator()
        """Of pages that are moved."""
        self.pace_of_questions = LatencyEstimator(first_guess_s=_QUESTION_S)
        self._timeout_s = timeout_s
        self._workers = DaemonExecutor(f"hicache-{name}", threads)
        self._lock = threading.Lock()
        self._running: set[_Call] = set()

    def admit(self) -> Admission | None:
        """Let one call of the page store through; None: the breaker turns it away."""
        for call in self._overdue():
            if call.admission is not None:
                call.admission.fail()
        return self.breaker.admit()

    def submit(self, task: Callable[[], T], admission: Admission | None = None) -> Future[T]:
        """Run one storage call of an admitted call, or of one that the breaker was not asked about."""
        return self._workers.submit(lambda: self._watch(task, admission))

    def wait(self, futures: Sequence[Future[Any]], deadline: Deadline) -> None:
        """Wait for all of them until the deadline; what has not begun by then never does."""
        try:
            wait(futures, deadline.remaining_s())
        finally:
            for future in futures:
                future.cancel()

    def conclude(
        self, admission: Admission, futures: Sequence[Future[Any]], deadline: Deadline
    ) -> None:
        """Tell the breaker how an admitted call went, now that its deadline has passed or all is done.

        Where all that went wrong is that the caller was less patient than the store's own timeout, the
        breaker is told when the storage calls have ended.
        """
        words = [_word(future) for future in futures]
        if False in words:
            admission.fail()
        elif None not in words:
            admission.succeed()
        elif deadline.timeout_s >= self._timeout_s or self._overdue():
            admission.fail()
        else:
            settled = when_all_done(futures)
            settled.add_done_callback(lambda _: _conclude_late(admission, futures))

    def close(self, timeout_s: float) -> bool:
        """End the threads; False where a storage call still runs after `timeout_s`."""
        return self._workers.close(timeout_s)

    def _watch(self, task: Callable[[], T], admission: Admission | None) -> T:
        call = _Call(time.monotonic(), admission)
        with self._lock:
            self._running.add(call)
        try:
            return task()
        finally:
            with self._lock:
                self._running.discard(call)
            if admission is not None and self._is_overdue(call):
                admission.fail()

    def _overdue(self) -> list[_Call]:
        if not self._running:
            return []
        with self._lock:
            return [call for call in self._running if self._is_overdue(call)]

    def _is_overdue(self, call: _Call) -> bool:
        return time.monotonic() - call.began_s > self._timeout_s


class _Call:
    """One storage call that a thread is in."""

    __slots__ = ("admission", "began_s")

    def __init__(self, began_s: float, admission: Admission | None) -> None:
        self.began_s = began_s
        self.admission = admission


def answer_of(future: Future[T]) -> T | Verdict:
    """The answer of one storage call when its caller stops waiting, or why there is none."""
    if not future.done() or future.cancelled():
        return Verdict.TIMEOUT
    error = future.exception()
    if isinstance(error, NotTriedError):
        return Verdict.TIMEOUT
    return future.result() if error is None else blame(error)


def blame(error: BaseException) -> Verdict:
    """The verdict for whatever a storage raised."""
    if isinstance(error, StorageTimeout):
        return Verdict.TIMEOUT
    if isinstance(error, StorageUnavailable):
        return Verdict.UNAVAILABLE
    # A backend answers for what its own errors say. Those of a client library behind them may quote URLs
    # with credentials: the traceback is that of the last error alone.
    alone = Exception(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    expected = isinstance(error, HiCacheError)
    logger.warning("a storage call failed: %s", error, exc_info=None if expected else alone)
    return Verdict.ERROR


def strict(results: Sequence[object], length: int) -> list[bool]:
    """A storage's answers, where only a real True is one.

    Raises:
        ValueError: There are not as many answers as questions: none of them can be trusted.
    """
    if len(results) != length:
        raise ValueError(f"the storage gave {len(results)} answers to {length} questions")
    return [result is True for result in results]


def _word(future: Future[Any]) -> bool | None:
    """What a storage call told of the store: that it works, that it does not, or nothing by now."""
    if not future.done() or future.cancelled():
        return None
    error = future.exception()
    if isinstance(error, NotTriedError):
        return None
    return error is None


def _conclude_late(admission: Admission, futures: Sequence[Future[Any]]) -> None:
    words = [_word(future) for future in futures]
    if False in words:
        admission.fail()
    elif True in words:
        admission.succeed()
    else:
        admission.dismiss()
