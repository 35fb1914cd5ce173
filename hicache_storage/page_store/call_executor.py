"""Threads that run the storage calls of one direction, and the reports to that direction's breaker."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.backend_support.executor import DaemonExecutor, when_all_done
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import Any

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page_store.breaker import CircuitBreaker, Permit
    from hicache_storage.page_store.state_log import StateLog

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

T = TypeVar("T")

# A storage call begins a little after its caller, and waits for a little less than its deadline.
_MOST = 0.9


class NotTriedError(Exception):
    """The deadline passed before a storage call began. The error is no evidence about the store."""


class CallExecutor:
    """Storage calls of one direction. Thread-safe.

    A storage call that runs for longer than `timeout_s` is a failure of the store, also where its
    caller stopped waiting earlier. The breaker records the failure when the storage call ends, or
    when the next call asks for a permit.
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
        self._timeout_s = timeout_s
        self._executor = DaemonExecutor(f"hicache-{name}", threads)
        self._lock = threading.Lock()
        self._running: set[_RunningCall] = set()

    @property
    def idle_threads(self) -> int:
        """The threads without a call, and 1 where there are none."""
        return max(1, self.threads - len(self._running) - self._executor.waiting_count)

    def admit(self) -> Permit | None:
        """Return a permit for one call of the page store. Return None where the breaker refuses it."""
        for call in self._overdue():
            if call.permit is not None:
                call.permit.fail()
        return self.breaker.admit()

    def submit(self, task: Callable[[], T], permit: Permit | None = None) -> Future[T]:
        """Run one storage call, of a call with a `permit` or of one that needs none."""
        return self._executor.submit(lambda: self._run(task, permit), caller=permit)

    def wait(self, futures: Sequence[Future[Any]], deadline: Deadline) -> None:
        """Wait for `futures` until the deadline. Cancel calls that have not begun by then."""
        try:
            wait(futures, deadline.remaining_s())
        finally:
            for future in futures:
                future.cancel()

    def conclude(
        self,
        permit: Permit,
        futures: Sequence[Future[Any]],
        deadline: Deadline,
        hang_s: float | None = None,
    ) -> None:
        """Report the end of a call to the breaker: its deadline has passed or its futures are done.

        Storage calls may still run because the call's deadline was shorter than `timeout_s`. If
        nothing else failed, the breaker gets the report when these storage calls have ended. A store
        that left one of them without an answer for `hang_s` hangs.
        """
        successes = [_success(future) for future in futures]
        if hang_s is not None and self._hangs(permit, futures, hang_s):
            permit.fail(hung=True)
        elif False in successes:
            permit.fail()
        elif None not in successes:
            permit.succeed()
        elif deadline.timeout_s >= self._timeout_s or self._overdue():
            permit.fail()
        else:
            settled = when_all_done(futures)
            settled.add_done_callback(lambda _: _conclude_late(permit, futures))

    def close(self, timeout_s: float) -> bool:
        """End the threads. Return False where a storage call still runs after `timeout_s`."""
        return self._executor.close(timeout_s)

    def _run(self, task: Callable[[], T], permit: Permit | None) -> T:
        call = _RunningCall(time.monotonic(), permit)
        with self._lock:
            self._running.add(call)
        try:
            return task()
        finally:
            with self._lock:
                self._running.discard(call)
            if permit is not None and self._is_overdue(call):
                permit.fail()

    def _hangs(self, permit: Permit, futures: Sequence[Future[Any]], hang_s: float) -> bool:
        """Return whether the store has answered with a time-out, or has not answered for `hang_s`.

        A storage call that never began shows nothing by itself: calls of others, which are overdue, may
        hold all threads.
        """
        if any(isinstance(_error(future), StorageTimeout) for future in futures):
            return True
        if all(_success(future) is not None for future in futures):
            return False
        since_s = time.monotonic() - _MOST * hang_s
        with self._lock:
            own = [call for call in self._running if call.permit is permit]
        return any(call.began_s <= since_s for call in own) or bool(self._overdue())

    def _overdue(self) -> list[_RunningCall]:
        if not self._running:
            return []
        with self._lock:
            return [call for call in self._running if self._is_overdue(call)]

    def _is_overdue(self, call: _RunningCall) -> bool:
        return time.monotonic() - call.began_s > self._timeout_s


class _RunningCall:
    """One storage call that a thread runs."""

    __slots__ = ("began_s", "permit")

    def __init__(self, began_s: float, permit: Permit | None) -> None:
        self.began_s = began_s
        self.permit = permit


def result_of(future: Future[T]) -> T | Verdict:
    """Return the result of a storage call that its caller stops waiting for, or the verdict instead."""
    if not future.done() or future.cancelled():
        return Verdict.TIMEOUT
    error = future.exception()
    if isinstance(error, NotTriedError):
        return Verdict.TIMEOUT
    return future.result() if error is None else verdict_for(error)


def verdict_for(error: BaseException) -> Verdict:
    """Return the verdict for an error that a storage raised. Log an error that is unexpected."""
    if isinstance(error, StorageTimeout):
        return Verdict.TIMEOUT
    if isinstance(error, StorageUnavailable):
        return Verdict.UNAVAILABLE
    # A backend is responsible for the text of its own errors. The errors of a client library that
    # caused them may quote URLs with credentials: the log shows the traceback of the last error
    # alone.
    alone = Exception(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
    expected = isinstance(error, HiCacheError)
    logger.warning("a storage call failed: %s", error, exc_info=None if expected else alone)
    return Verdict.ERROR


def checked_answers(answers: Sequence[object], length: int) -> list[bool]:
    """Return a storage's answers, in which only True itself counts as True.

    Raises:
        ValueError: There are not `length` answers: no answer belongs to a known page.
    """
    if len(answers) != length:
        raise ValueError(f"the storage gave {len(answers)} answers to {length} questions")
    return [answer is True for answer in answers]


def _error(future: Future[Any]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _success(future: Future[Any]) -> bool | None:
    """Return True if a storage call succeeded, False if it failed, None if it has not ended."""
    if not future.done() or future.cancelled() or isinstance(_error(future), NotTriedError):
        return None
    return _error(future) is None


def _conclude_late(permit: Permit, futures: Sequence[Future[Any]]) -> None:
    successes = [_success(future) for future in futures]
    if False in successes:
        permit.fail()
    elif True in successes:
        permit.succeed()
    else:
        permit.dismiss()
