from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, wait
from functools import partial

import pytest
from processes import exit_code
from servers import wait_until

from hicache_storage.backend_support.executor import DaemonExecutor, call_when_done
from hicache_storage.errors import StorageClosed


def test_tasks_give_their_results() -> None:
    executor = DaemonExecutor("test", 2)

    results = [executor.submit(lambda n=n: n * n) for n in range(20)]  # type: ignore[misc]

    assert [n * n for n in range(20)] == [future.result(10) for future in results]
    assert executor.close(10)


def test_as_many_tasks_run_at_once_as_there_are_threads() -> None:
    executor = DaemonExecutor("test", 3)
    meeting = threading.Barrier(3)

    together = [executor.submit(lambda: meeting.wait(10)) for _ in range(3)]

    assert {0, 1, 2} == {future.result(10) for future in together}
    assert executor.close(10)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_thread_survives_whatever_a_task_raises(error: BaseException) -> None:
    executor = DaemonExecutor("test", 1)

    def fail() -> None:
        raise error

    failed = executor.submit(fail)
    after = executor.submit(lambda: "alive")

    assert error is failed.exception(10)
    assert after.result(10) == "alive"
    assert executor.close(10)


def test_a_task_that_has_not_begun_can_be_cancelled() -> None:
    executor = DaemonExecutor("test", 1)
    go_on = threading.Event()
    running = executor.submit(lambda: go_on.wait(30))
    ran = threading.Event()
    queued = executor.submit(ran.set)

    assert queued.cancel()
    go_on.set()

    assert running.result(10)
    assert executor.close(10)
    assert not ran.is_set()


def test_a_cancelled_task_is_let_go_at_once() -> None:
    """Thousands of cancelled tasks behind a hanging one keep no pages in memory."""

    class Pages:
        def run(self) -> None: ...

    executor = DaemonExecutor("test", 1)
    go_on, begun = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        return go_on.wait(30)

    running = executor.submit(hang)
    assert begun.wait(30)
    pages = Pages()
    kept = weakref.ref(pages)
    queued = executor.submit(pages.run)
    del pages
    assert kept() is not None

    assert queued.cancel()

    assert kept() is None
    assert wait([queued], 10).done == {queued}
    go_on.set()
    assert running.result(10)
    assert executor.close(10)


def test_in_a_forked_child_a_task_fails_at_once_even_if_the_lock_was_held() -> None:
    executor = DaemonExecutor("test", 1)
    with executor._changed:
        child = os.fork()
        if child == 0:
            error = executor.submit(lambda: None).exception(0)
            os._exit(0 if isinstance(error, StorageClosed) and executor.close(10) else 1)

    assert exit_code(child) == 0
    assert executor.submit(lambda: "alive").result(10) == "alive"
    assert executor.close(10)


def test_close_gives_up_on_a_task_that_hangs() -> None:
    executor = DaemonExecutor("test", 1)
    go_on = threading.Event()
    executor.submit(lambda: go_on.wait(30))

    assert not executor.close(0.05)

    go_on.set()
    assert executor.close(10)


def test_a_task_that_comes_after_the_end_fails_at_once() -> None:
    executor = DaemonExecutor("test", 1)
    assert executor.close(10)

    assert isinstance(executor.submit(lambda: "never").exception(0), StorageClosed)


def test_a_task_that_hangs_does_not_keep_the_interpreter_alive() -> None:
    code = (
        "import threading; from hicache_storage.backend_support.executor import DaemonExecutor;"
        "begun = threading.Event(); never = threading.Event();"
        "DaemonExecutor('test', 1).submit(lambda: (begun.set(), never.wait()));"
        "begun.wait()"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


def test_call_when_done_waits_for_the_last() -> None:
    first, second = Future[int](), Future[int]()
    done: Future[None] = Future()
    call_when_done([first, second], lambda: done.set_result(None))

    first.set_result(1)
    assert not done.done()
    second.set_exception(ValueError())

    assert done.done()


def test_call_when_done_of_nothing_calls_at_once() -> None:
    done: Future[None] = Future()
    call_when_done([], lambda: done.set_result(None))

    assert done.done()


def test_an_idle_thread_holds_no_result() -> None:
    """A page that a task returned is freed with its future."""

    class Thing:
        pass

    executor = DaemonExecutor("test", 1)
    future = executor.submit(Thing)
    wait([future], 10)
    thing = weakref.ref(future.result())
    executor.submit(lambda: None).result(10)
    del future

    assert thing() is None
    assert executor.close(10)


def test_callers_take_turns() -> None:
    executor = DaemonExecutor("test", 1)
    began, gate = list[str](), threading.Event()
    executor.submit(gate.wait)
    futures = [
        executor.submit(partial(began.append, name), caller=name[0])
        for name in ("a1", "a2", "a3", "b1")
    ]
    gate.set()
    for future in futures:
        future.result(10)
    executor.close(10)

    assert ["a1", "b1", "a2", "a3"] == began


def test_urgent_tasks_come_first() -> None:
    executor = DaemonExecutor("test", 1)
    began, gate = list[str](), threading.Event()
    held = executor.submit(gate.wait)
    wait_until(held.running)
    futures = [
        executor.submit(partial(began.append, name), caller=name, is_urgent=name > "b")
        for name in ("a", "b", "c", "d")
    ]
    futures[-1].cancel()
    assert 3 == executor.waiting_count
    gate.set()
    for future in futures[:-1]:
        future.result(10)
    executor.close(10)

    assert ["c", "a", "b"] == began
