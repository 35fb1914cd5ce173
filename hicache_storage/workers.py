"""Threads that may be left behind: a store that hangs must hang neither a caller nor the exit."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Workers:
    """A fixed number of daemon threads behind one queue.

    The standard library's executor joins its threads when the interpreter exits, so that one blocked
    storage call would block the exit for ever. These threads are daemons, and `close` gives up in time.
    """

    def __init__(self, name: str, count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._name = name
        self._closed = False
        self._closing = threading.Lock()
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Run `task` on one of the threads. Cancelling works until it has begun.

        After `close` nobody would: the future has ended with StorageClosed.
        """
        future: Future[T] = Future()
        with self._closing:
            if not self._closed:
                self._tasks.put((future, task))
                return future
        future.set_exception(StorageClosed(f"{self._name}: its threads have ended, it was closed"))
        return future

    def close(self, timeout_s: float) -> bool:
        """End the threads once their tasks are done; False where some still run after `timeout_s`."""
        with self._closing:
            self._closed = True
            for _ in self._threads:
                self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            future, task = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = task()
            except BaseException as error:  # noqa: BLE001 - whatever a store raises, the thread lives on
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, task  # an idle thread holds no page


def when_all_done(futures: Sequence[Future[Any]]) -> Future[None]:
    """A future that is done when all of `futures` are, however they ended."""
    done: Future[None] = Future()
    if not futures:
        done.set_result(None)
        return done
    remaining = len(futures)
    lock = threading.Lock()

    def count_down(_: Future[Any]) -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            last = remaining == 0
        if last:
            done.set_result(None)

    for future in futures:
        future.add_done_callback(count_down)
    return done
