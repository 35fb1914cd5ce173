"""Futures for the tasks of an LMCache L2 adapter, and the thread that completes them."""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_STORE, _LOOK_UP, _LOAD = range(3)


class Tasks:
    """The running tasks of an adapter, and one thread that waits on the adapter's eventfds.

    Keeps the objects of each task until the task is done. As in LMCache, there is no time limit.
    Thread-safe.
    """

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], tuple[Future[list[bool]], Sequence[Any]]] = {}
        self._results: dict[int, Callable[[int], Any]] = {
            _LOOK_UP: adapter.query_lookup_and_lock_result,
            _LOAD: adapter.query_load_result,
        }
        self._closed = False
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="lmcache-tasks", daemon=True)
        self._thread.start()

    def store(self, keys: list[Any], objects: list[Any]) -> Future[list[bool]]:
        """Submit a task that stores objects. The future has one result for the whole task."""
        return self._submitted(
            _STORE, lambda: self._adapter.submit_store_task(keys, objects), objects
        )

    def look_up(self, keys: list[Any]) -> Future[list[bool]]:
        """Submit a task that looks up keys. The future has one result per key.

        The adapter locks the found keys until `submit_unlock`.
        """
        return self._submitted(
            _LOOK_UP, lambda: self._adapter.submit_lookup_and_lock_task(keys, {}), keys
        )

    def load(self, keys: list[Any], objects: list[Any]) -> Future[list[bool]]:
        """Submit a task that reads into the objects. The future has one result per object."""
        return self._submitted(
            _LOAD, lambda: self._adapter.submit_load_task(keys, objects), objects
        )

    def close(self) -> None:
        """End the thread. Waiting and later tasks fail with StorageClosed."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        with self._lock:
            self._closed = True
            for future, _ in self._waiting.values():
                future.set_exception(
                    StorageClosed("the adapter was closed before the task was done")
                )
            self._waiting.clear()

    def _submitted(
        self, kind: int, submit: Callable[[], int], objects: Sequence[Any]
    ) -> Future[list[bool]]:
        future: Future[list[bool]] = Future()
        with self._lock:  # the thread must not look for the result before the task is registered
            if self._closed:
                raise StorageClosed("the adapter was closed: it takes no more tasks")
            self._waiting[kind, submit()] = future, objects
        return future

    def _run(self) -> None:
        signals = [
            self._adapter.get_store_event_fd(),
            self._adapter.get_lookup_and_lock_event_fd(),
            self._adapter.get_load_event_fd(),
        ]
        poll = select.poll()
        for signal in [*signals, self._stop]:
            poll.register(signal, select.POLLIN)
        while True:
            ready = [signal for signal, _ in poll.poll()]
            if self._stop in ready:
                return
            for signal in ready:
                with suppress(BlockingIOError):
                    os.eventfd_read(signal)
            for future, verdicts in self._done():
                future.set_result(verdicts)

    def _done(self) -> list[tuple[Future[list[bool]], list[bool]]]:
        with self._lock:
            done: list[tuple[Future[list[bool]], list[bool]]] = []
            for task, result in self._adapter.pop_completed_store_tasks().items():
                future, _ = self._waiting.pop((_STORE, task))
                done.append((future, [result.is_successful()]))
            for kind, task in [key for key in self._waiting if key[0] != _STORE]:
                bitmap = self._results[kind](task)
                if bitmap is not None:
                    future, objects = self._waiting.pop((kind, task))
                    done.append((future, [bitmap.test(place) for place in range(len(objects))]))
            return done
