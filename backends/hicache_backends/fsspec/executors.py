"""Where the calls of a filesystem run: an event loop of its own, or threads of its own.

An operation is a coroutine function of one item. On an event loop it waits like any other; on a thread
its filesystem blocks, so it never waits, and one step of it is all of it.
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
    from collections.abc import Callable, Coroutine, Sequence
    from concurrent.futures import Executor

    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
Item = TypeVar("Item")
Operation: TypeAlias = "Callable[[Item], Coroutine[Any, Any, T]]"

_THREAD_NAME = "hicache-fsspec"
_BLOCKING_THREADS = 4
_GRACE_S = 0.4
"""What an event loop may be late: then it is blocked, and is not waited for any longer."""
_CLOSE_LIMIT_S = 3.0
"""For each step of closing."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What came of one item: a value, or an error."""

    value: T | None = None
    error: Exception | None = None


class Lane(Protocol):
    """Runs operations, several at once."""

    def each(
        self, operation: Operation[Item, T], items: Sequence[Item], deadline: Deadline
    ) -> list[Answer[T]]:
        """Return one answer an item; TimeoutError for those that have none by the deadline.

        Raises:
            StorageClosed: The lane is closed, or was meanwhile.
        """
        ...

    def close(self, farewell: Operation[None, None]) -> None:
        """End what runs, say farewell, and end the threads. Once."""
        ...


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose blocking calls, name look-ups above all, block no exit of the interpreter.

    The standard library joins the threads of its executors there, however long one hangs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._blocking: DaemonExecutor | None = None

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Arguments], T],
        *args: *Arguments,
    ) -> asyncio.Future[T]:
        """Run `func` on a thread: one of this loop's, unless an executor is given."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        if self._blocking is None:
            self._blocking = DaemonExecutor(f"{_THREAD_NAME}-blocking", _BLOCKING_THREADS)
        return asyncio.wrap_future(self._blocking.submit(partial(func, *args)), loop=self)

    def end_blocking(self) -> None:
        """End the threads; those that hang are left behind."""
        if self._blocking is not None:
            self._blocking.close(_CLOSE_LIMIT_S)


class EventLoopLane:
    """An event loop on a thread of its own, for filesystems that are asynchronous."""

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
    ) -> list[Answer[T]]:
        answers = _unanswered(operation, items)
        done = self._started(self._all(operation, items, answers, deadline))
        try:
            done.result(deadline.remaining_s() + _GRACE_S)
        except CancelledError:
            raise _closed() from None
        except TimeoutError:
            done.cancel()
        return list(answers)

    def close(self, farewell: Operation[None, None]) -> None:
        with self._lock:
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(farewell), self.loop)
        with suppress(TimeoutError):
            ended.result(3 * _CLOSE_LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)
        self.loop.end_blocking()
        if not self._thread.is_alive():
            self.loop.close()

    def _started(self, work: Coroutine[Any, Any, None]) -> Any:
        with self._lock:
            if self._closed:
                work.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def _all(
        self,
        operation: Operation[Item, T],
        items: Sequence[Item],
        answers: list[Answer[T]],
        deadline: Deadline,
    ) -> None:
        tasks = [
            asyncio.ensure_future(self._one(operation, item, answers, place))
            for place, item in enumerate(items)
        ]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=deadline.remaining_s())
        finally:
            for task in tasks:
                task.cancel()

    async def _one(
        self, operation: Operation[Item, T], item: Item, answers: list[Answer[T]], place: int
    ) -> None:
        async with self._slots:
            answers[place] = await _answer(operation, item)

    async def _end(self, farewell: Operation[None, None]) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CLOSE_LIMIT_S)
        await asyncio.wait([asyncio.ensure_future(farewell(None))], timeout=_CLOSE_LIMIT_S)


class ThreadLane:
    """Threads, for filesystems whose calls block. A call that hangs is left behind with its thread."""

    def __init__(self, width: int) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._width = width
        self._workers = DaemonExecutor(_THREAD_NAME, width)

    def each(
        self, operation: Operation[Item, T], items: Sequence[Item], deadline: Deadline
    ) -> list[Answer[T]]:
        answers = _unanswered(operation, items)
        parts = min(self._width, len(items))
        with self._lock:
            if self._closed:
                raise _closed()
            futures = [
                self._workers.submit(
                    partial(self._some, operation, items, answers, places, deadline)
                )
                for places in (range(first, len(items), parts) for first in range(parts))
            ]
        for future in wait(futures, deadline.remaining_s()).not_done:
            future.cancel()
        if self._closed:
            raise _closed()
        return list(answers)

    def close(self, farewell: Operation[None, None]) -> None:
        with self._lock:
            self._closed = True
        _stepped(_answer(farewell, None))  # before the threads end: it wakes those that wait
        self._workers.close(_CLOSE_LIMIT_S)

    def _some(
        self,
        operation: Operation[Item, T],
        items: Sequence[Item],
        answers: list[Answer[T]],
        places: range,
        deadline: Deadline,
    ) -> None:
        for place in places:
            if self._closed or deadline.passed():
                return
            answers[place] = _stepped(_answer(operation, items[place]))


def _unanswered(_: Operation[Item, T], items: Sequence[Item]) -> list[Answer[T]]:
    return [Answer(error=TimeoutError("no answer in time"))] * len(items)


async def _answer(operation: Operation[Item, T], item: Item) -> Answer[T]:
    try:
        return Answer(await operation(item))
    except Exception as error:  # noqa: BLE001 - whatever a filesystem raises is judged by the caller
        return Answer(error=error)


def _stepped(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    work.close()
    raise RuntimeError("a blocking filesystem waited for an event loop")


def _closed() -> StorageClosed:
    return StorageClosed("this FsspecStorage was closed: open a new one")
