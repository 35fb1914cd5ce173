"""Executors of operations: event loop and threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest
from fsspec_stores import LIMIT_S
from hicache_backends.fsspec.executors import EventLoopExecutor, Executor, ThreadExecutor

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageClosed


@pytest.fixture(params=[EventLoopExecutor, ThreadExecutor])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    made: Executor = request.param(2)
    yield made
    made.close(on_close)


async def on_close(_: None) -> None:
    """Close nothing."""


class TestExecutors:
    def test_answers_are_in_the_order_of_the_items(self, executor: Executor) -> None:
        async def halve(number: int) -> float:
            return 10 / number

        answers = executor.each(halve, [1, 0, 5], Deadline(LIMIT_S))

        assert [10.0, None, 2.0] == [answer.value for answer in answers]
        assert isinstance(answers[1].error, ZeroDivisionError)

    def test_an_item_not_done_by_the_deadline_is_late(self) -> None:
        async def wait(duration_s: float) -> str:
            await asyncio.sleep(duration_s)
            return "done"

        executor = EventLoopExecutor(2)
        quick, slow = executor.each(wait, [0.0, LIMIT_S], Deadline(0.2))
        executor.close(on_close)

        assert quick.value == "done"
        assert isinstance(slow.error, TimeoutError)

    def test_close_ends_those_who_wait(self) -> None:
        started = threading.Event()
        raised: list[Exception] = []

        async def wait(_: None) -> None:
            started.set()
            await asyncio.sleep(LIMIT_S)

        def call(executor: Executor) -> None:
            try:
                executor.each(wait, [None], Deadline(LIMIT_S))
            except StorageClosed as error:
                raised.append(error)

        executor = EventLoopExecutor(2)
        caller = threading.Thread(target=call, args=(executor,))
        caller.start()
        assert started.wait(LIMIT_S)
        executor.close(on_close)
        caller.join(LIMIT_S)

        assert len(raised) == 1

    def test_nothing_starts_after_close(self, executor: Executor) -> None:
        async def never(_: None) -> None:
            raise AssertionError

        closed = type(executor)(1)  # type: ignore[call-arg]
        closed.close(on_close)
        with pytest.raises(StorageClosed):
            closed.each(never, [None], Deadline(LIMIT_S))


class TestExit:
    def test_a_name_look_up_that_hangs_does_not_keep_the_interpreter(self) -> None:
        """Client libraries look up names on the executor of the event loop."""
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", textwrap.dedent(_HANGS)], timeout=100, check=True)

        assert time.monotonic() - began_s < 50


_HANGS = """
    import asyncio, threading, time
    from hicache_backends.fsspec.executors import EventLoopExecutor
    from hicache_storage.backend_support.deadline import Deadline

    began = threading.Event()

    def hang():
        began.set()
        time.sleep(90)

    async def look_up(_):
        await asyncio.get_running_loop().run_in_executor(None, hang)

    (answer,) = EventLoopExecutor(1).each(look_up, [None], Deadline(2))
    assert isinstance(answer.error, TimeoutError)
    assert began.is_set()
"""
