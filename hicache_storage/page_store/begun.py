"""Run the calls of a page store: in their caller's thread, or while their caller does something else.

A call is a generator. It yields the storage calls that it waits for, and goes on when they have ended or
when its deadline has passed. `finish` runs it in this thread. `Calls.begin` returns a future and runs it
in the thread `hicache-calls`, which never waits for a store, so one thread is enough for all calls.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from hicache_storage.backend_support.executor import call_when_done

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.deadline import Deadline

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

T = TypeVar("T")

_MOST_IN_BACKGROUND = 2
_CLOSE_S = 1.0


class Waiting(NamedTuple):
    """What a call waits for: storage calls. Those that have not begun at the deadline are canceled."""

    futures: Sequence[Future[Any]]
    deadline: Deadline | None
    """None: wait until all have ended."""

    def wait(self) -> None:
        """Wait in this thread."""
        futures, deadline = self
        left_s = None if deadline is None else deadline.remaining_s()
        try:
            if len(futures) == 1:  # the usual case, and faster than `wait`
                futures[0].exception(left_s)
            else:
                wait(futures, left_s)
        except (TimeoutError, CancelledError):
            pass
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the storage calls that have not begun."""
        for future in self.futures:
            future.cancel()

    @property
    def has_unbegun(self) -> bool:
        """True while a storage call waits for a thread."""
        return any(not (future.running() or future.done()) for future in self.futures)


Call: TypeAlias = Generator[Waiting, None, T]
_Timer: TypeAlias = "tuple[float, int, Once, Waiting | None]"


def finish(call: Call[T]) -> T:
    """Run a call to its end in this thread, and return its result."""
    try:
        while True:
            next(call).wait()
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        call.close()  # so an interrupt ends the loan of the caller's pages


class Begun(Future[T]):
    """The result of a call that was begun. It is done at the call's deadline at the latest.

    Its callbacks run in the thread `hicache-calls`, so they must not block. It can't be canceled.
    """

    def __init__(self, call: Call[T], deadline: Deadline, *, in_background: bool = False) -> None:
        super().__init__()
        self.deadline: Deadline = deadline
        self.in_background: bool = in_background
        self.began_s: float = time.monotonic()
        """When the call left its queue, from `time.monotonic`."""
        self._call: Call[T] | None = call
        self._has_begun = False

    def cancel(self) -> bool:
        """Return False: the call ends by itself, at its deadline at the latest."""
        return False

    def step(self) -> Waiting | None:
        """Go on with the call. Return what it waits for next, or None if it has ended."""
        if self._call is None:
            return None
        try:
            if not self._has_begun:
                self._has_begun = True
                self.began_s = time.monotonic()
                self.set_running_or_notify_cancel()
            return next(self._call)
        except StopIteration as end:
            self._call = None
            self.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._call = None
            self.set_exception(error)
        return None


class Once:
    """A function that runs once, when it is first called, and keeps nothing in memory afterwards."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    @property
    def is_over(self) -> bool:
        return self._function is None

    def __call__(self) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


def _run_late(timer: _Timer) -> None:
    """Run what a timer is for, at its time."""
    _, _, once, waiting = timer
    if waiting is not None and not once.is_over:
        waiting.cancel()
    once()


class Calls:
    """The calls of one process that were begun. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[_Timer] = []
        self._numbers = count()
        self._thread: threading.Thread | None = None
        self._closed = self._ended = False
        # The rest belongs to the thread.
        self._held: deque[Once] = deque()
        self._live: dict[Begun[Any], Waiting | None] = {}
        """What each call waits for, or None while it is held back."""

    def begin(self, call: Call[T], deadline: Deadline, *, background: bool = False) -> Begun[T]:
        """Begin a call, without waiting for anything. Its errors are the future's.

        Calls in the `background` begin in order, two at a time, while no other call waits for a thread.
        """
        begun = Begun(call, deadline, in_background=background)
        self.soon(partial(self._hold if background else self.go_on, begun))
        return begun

    def soon(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread. It must not block."""
        self._ready.put(function)
        if self._thread is None:
            self._start()
        if self._ended:
            self._run_ready()

    def expire(self) -> None:
        """End all calls, as if their deadlines had passed."""
        self.soon(self._expire)

    def close(self) -> None:
        """End all calls, as if their deadlines had passed, and the thread. Idempotent."""
        with self._lock:
            self._closed = True
            self._ended |= self._thread is None
        self.expire()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    # --- in the thread -------------------------------------------------------------------------------

    def at(self, deadline: Deadline, once: Once, waiting: Waiting | None = None) -> None:
        """Run `once` at the deadline, unless it has run before. Cancel what it waits for."""
        heapq.heappush(self._timers, (deadline.end_s, next(self._numbers), once, waiting))

    def _hold(self, begun: Begun[Any]) -> None:
        self._live[begun] = None
        once = Once(partial(self.go_on, begun))
        self.at(begun.deadline, once)
        self._held.append(once)

    def _begin_held(self) -> None:
        while self._held and (self._held[0].is_over or not self._is_busy()):
            self._held.popleft()()

    def _is_busy(self) -> bool:
        """Return whether calls in the background must wait."""
        if self._closed:
            return False
        under_way = [(begun, waiting) for begun, waiting in self._live.items() if waiting]
        return sum(begun.in_background for begun, _ in under_way) >= _MOST_IN_BACKGROUND or any(
            waiting.has_unbegun for begun, waiting in under_way if not begun.in_background
        )

    def go_on(self, begun: Begun[Any]) -> None:
        """Begin a call, or go on with it."""
        waiting = begun.step()
        if waiting is None:
            self._live.pop(begun, None)
            return
        self._live[begun] = waiting
        once = Once(partial(self.go_on, begun))
        if waiting.deadline is not None:
            self.at(waiting.deadline, once, waiting)
        call_when_done(waiting.futures, lambda: self.soon(once))
        if self._ended:
            waiting.cancel()
            once()

    def _expire(self) -> None:
        while self._timers:  # the end of one call may begin others, which end too
            for begun in self._live:
                begun.deadline.expire()
            timers, self._timers = self._timers, []
            for timer in sorted(timers):
                _run_late(timer)

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
            self._begin_held()
        except BaseException:
            logger.exception("a call could not go on")

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._work, name="hicache-calls", daemon=True
                )
                self._thread.start()

    def _work(self) -> None:
        while not (self._closed and self._ready.empty() and not self._live):
            try:
                function = self._ready.get(timeout=self._until_next_s())
            except queue.Empty:
                function = partial(_run_late, heapq.heappop(self._timers))
            self._run(function)
            del function  # or an idle thread would keep the call's pages in memory
        self._ended = True
        self._run_ready()

    def _run_ready(self) -> None:
        """Run what was added while the thread ended, in any thread."""
        with suppress(queue.Empty):
            while True:
                self._run(self._ready.get_nowait())

    def _until_next_s(self) -> float | None:
        """Return how long the next timer waits, or None if there is none."""
        while self._timers and self._timers[0][2].is_over:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
