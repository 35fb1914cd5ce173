"""Daemon threads for storage calls. A store that hangs blocks neither its callers nor the exit."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


_Tasks: TypeAlias = "OrderedDict[object, OrderedDict[Future[Any], Callable[[], Any]]]"


class DaemonExecutor:
    """A fixed number of daemon threads. Callers take turns, so a caller with many tasks delays no other.
    Urgent tasks come first.

    The standard library's executor joins its threads when the interpreter exits, so one blocked storage
    call would block the exit forever. These threads are daemons, and `close` has a time limit. Threads
    do not survive a fork, so in a forked child every task fails at once.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._owner = os.getpid()
        self._tasks: _Tasks = OrderedDict()
        """The waiting tasks of each caller. The first caller has the next turn."""
        self._urgent: _Tasks = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting_count(self) -> int:
        """The number of tasks that wait for a thread."""
        both = (*self._urgent.values(), *self._tasks.values())
        return sum(map(len, both))

    def submit(
        self, task: Callable[[], T], caller: object = None, *, is_urgent: bool = False
    ) -> Future[T]:
        """Run `task` on one of the threads. To drop the task before it begins, cancel the future.

        Tasks of one `caller` begin in order. An urgent task begins before all that are not.

        After `close`, and in a forked child, the future fails at once with StorageClosed.
        """
        if self._owner != os.getpid():  # a thread of the parent may have held the lock
            return _failed(
                f"{self._name}: its threads stayed in the parent process when this one was forked"
            )
        future: Future[T] = _Queued(self, caller)
        with self._changed:
            if not self._closed:
                tasks = self._urgent if is_urgent else self._tasks
                tasks.setdefault(caller, OrderedDict())[future] = task
                self._changed.notify()
                return future
        return _failed(f"{self._name} was closed, so its threads have ended")

    def close(self, timeout_s: float) -> bool:
        """End the threads after their tasks. Return False if some still run after `timeout_s`."""
        if self._owner != os.getpid():
            return True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(deadline.remaining_s())
        return not any(thread.is_alive() for thread in self._threads)

    def remove(self, future: Future[Any], caller: object) -> bool:
        """Remove a caller's task from the queue. Return False if the task is not in the queue."""
        if self._owner != os.getpid():
            return False
        with self._changed:
            for of_callers in (self._urgent, self._tasks):
                tasks = of_callers.get(caller)
                if tasks is not None and tasks.pop(future, None) is not None:
                    if not tasks:
                        del of_callers[caller]
                    return True
            return False

    def _work(self) -> None:
        while (item := self._next()) is not None:
            future, task = item
            if future.set_running_or_notify_cancel():
                try:
                    result = task()
                except BaseException as error:  # noqa: BLE001 - the thread survives any error
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, task  # so that an idle thread keeps no page in memory

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._urgent or self._tasks or self._closed)
            of_callers = self._urgent or self._tasks
            if not of_callers:
                return None
            caller, tasks = of_callers.popitem(last=False)
            item = tasks.popitem(last=False)
            if tasks:
                of_callers[caller] = tasks
            return item


class _Queued(Future[T]):
    """A future that leaves the queue when it is canceled, which frees its task's memory."""

    def __init__(self, executor: DaemonExecutor, caller: object) -> None:
        super().__init__()
        self._executor = executor
        self._caller = caller

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled and self._executor.remove(self, self._caller):
            self.set_running_or_notify_cancel()  # no thread will find the task and notify waiters
        return cancelled


def _failed(message: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(StorageClosed(message))
    return future


def call_when_done(futures: Sequence[Future[Any]], function: Callable[[], object]) -> None:
    """Call `function` once, when all of `futures` are done, canceled or failed."""
    if not futures:
        function()
        return
    if len(futures) == 1:
        futures[0].add_done_callback(lambda _: function())
        return
    remaining = len(futures)
    lock = threading.Lock()

    def count_down(_: Future[Any]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            last = remaining == 0
        if last:
            function()

    for future in futures:
        future.add_done_callback(count_down)
