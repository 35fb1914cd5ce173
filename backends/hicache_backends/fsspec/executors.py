"""Run a filesystem's calls: on an event loop that has its own thread, or on several threads.

An operation is a coroutine function of one item. On an event loop it waits like any other
coroutine. In a thread executor the filesystem blocks instead, so the operation never waits, and a
single step runs it to its end.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, TypeVarTuple

from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Coroutine, Sequence

    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Item = TypeVar("Item")
Operation: TypeAlias = "Callable[[Item], Coroutine[Any, Any, T]]"

_THREAD_NAME = "hicache-fsspec"
_BLOCKING_THREADS = 4
_GRACE_S = 0.4
"""How late an event loop may be. After that it counts as blocked."""
_CLOSE_LIMIT_S = 3.0
"""The limit of each step of `close`."""


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """The result of an operation on one item: a value or an error."""

    value: T | None = None
    error: Exception | None = None


class Executor(Protocol):
    """An executor that runs several operations at a time."""

    def each(
        self, operation: Operation[Item, T], items: Sequence[Item], deadline: Deadline
    ) -> list[Result[T]]:
        """Return one result per item. An item without a result by the deadline gets a TimeoutError.

        Raises:
            StorageClosed: The executor is closed, or was closed during the call.
        """
        ...

    def close(self, on_close: Operation[None, None]) -> None:
        """Cancel running operations, run `on_close`, and end the threads. Call this once."""
        ...


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose blocking calls, for example name lookups, do not delay interpreter exit.

    The standard library's executor joins its threads at exit, however long one of them hangs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocking: DaemonExecutor | None = None

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*Arguments], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        """Run `func` on `executor`. If that is None, use a daemon thread of this loop."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        if self._blocking is None:
            self._blocking = DaemonExecutor(f"{_THREAD_NAME}-blocking", _BLOCKING_THREADS)
        return asyncio.wrap_future(self._blocking.submit(partial(func, *args)), loop=self)

    def close_blocking(self) -> None:
        """End the threads of blocking calls. Threads that hang are left behind."""
        if self._blocking is not None:
            self._blocking.close(_CLOSE_LIMIT_S)


class EventLoopExecutor:
    """An executor for asynchronous filesystems: an event loop that has its own thread."""

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._slots = asyncio.Semaphore(width)
        self.loop = _Loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name=_THREAD_NAME, daemon=True
        )
        self._thread.start()

    def each(
        self, operation: Operation[Item, T], items: Sequence[Item], deadline: Deadline
    ) -> list[Result[T]]:
        results = _pending(operation, items)
        done = self._start(self._run_all(operation, items, results, deadline))
        try:
            done.result(deadline.remaining_s() + _GRACE_S)
        except CancelledError:
            raise _closed() from None
        except TimeoutError:
            done.cancel()
        return list(results)

    def close(self, on_close: Operation[None, None]) -> None:
        with self._lock:
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(on_close), self.loop)
        with suppress(TimeoutError):
            ended.result(3 * _CLOSE_LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)
        self.loop.close_blocking()
        if not self._thread.is_alive():
            self.loop.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _run_all(
        self,
        operation: Operation[Item, T],
        items: Sequence[Item],
        results: list[Result[T]],
        deadline: Deadline,
    ) -> None:
        tasks = [
            asyncio.ensure_future(self._run_one(operation, item, results, place))
            for place, item in enumerate(items)
        ]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=deadline.remaining_s())
        finally:
            for task in tasks:
                task.cancel()

    async def _run_one(
        self, operation: Operation[Item, T], item: Item, results: list[Result[T]], place: int
    ) -> None:
        async with self._slots:
            results[place] = await _result_of(operation, item)

    async def _end(self, on_close: Operation[None, None]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_LIMIT_S)
        await asyncio.wait([asyncio.ensure_future(on_close(None))], timeout=_CLOSE_LIMIT_S)


class ThreadExecutor:
    """An executor for blocking filesystems: several threads.

    If a call hangs, the call and its thread are left behind.
    """

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._width = width
        self._threads = DaemonExecutor(_THREAD_NAME, width)

    def each(
        self, operation: Operation[Item, T], items: Sequence[Item], deadline: Deadline
    ) -> list[Result[T]]:
        results = _pending(operation, items)
        parts = min(self._width, len(items))
        with self._lock:
            if self._closed:
                raise _closed()
            futures = [
                self._threads.submit(
                    partial(self._run_part, operation, items, results, places, deadline)
                )
                for places in (range(first, len(items), parts) for first in range(parts))
            ]
        for future in wait(futures, deadline.remaining_s()).not_done:
            future.cancel()
        if self._closed:
            raise _closed()
        return list(results)

    def close(self, on_close: Operation[None, None]) -> None:
        with self._lock:
            self._closed = True
        _run_at_once(_result_of(on_close, None))  # first, because this wakes waiting threads
        self._threads.close(_CLOSE_LIMIT_S)

    def _run_part(
        self,
        operation: Operation[Item, T],
        items: Sequence[Item],
        results: list[Result[T]],
        places: range,
        deadline: Deadline,
    ) -> None:
        for place in places:
            if self._closed or deadline.passed():
                return
            results[place] = _run_at_once(_result_of(operation, items[place]))


def _pending(_: Operation[Item, T], items: Sequence[Item]) -> list[Result[T]]:
    return [Result(error=TimeoutError("no answer in time"))] * len(items)


async def _result_of(operation: Operation[Item, T], item: Item) -> Result[T]:
    try:
        return Result(await operation(item))
    except Exception as error:  # noqa: BLE001 - a filesystem may raise anything; the caller maps it
        return Result(error=error)


def _run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never waits, and return its result."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("a blocking filesystem waited for an event loop")


def _closed() -> StorageClosed:
    return StorageClosed("this FsspecStorage was closed: open a new one")
