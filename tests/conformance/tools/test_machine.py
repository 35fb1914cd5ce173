"""How much of a duration the machine ran something else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.attempts import Attempt, make_attempt
from hicache_conformance.scenarios.fault_path import FaultPath, must_end_in_time
from hicache_conformance.selftest.references.subjects import DictSubject
from hicache_conformance.tools.processes.machine import WorkLimit, is_at_rest
from hicache_conformance.tools.processes.resources import wait_until

_WORK_S = 0.5
_LIMIT_S = 60.0


@pytest.fixture
def starved() -> Iterator[None]:
    """Let this process share one processor with three processes that are always busy."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for other in others:
        other.kill()
        other.wait(_LIMIT_S)
    os.sched_setaffinity(0, allowed)


def work() -> None:
    until_s = time.thread_time() + _WORK_S
    while time.thread_time() < until_s:
        pass


@pytest.mark.usefixtures("starved")
def test_what_a_busy_machine_takes_is_not_the_calls_own_time() -> None:
    with Case(DictSubject()) as case:
        attempt = make_attempt(case.open(), "work", work, limit_s=_LIMIT_S)

    assert attempt.elapsed_s > 2 * _WORK_S
    assert attempt.own_s < attempt.elapsed_s - _WORK_S / 2


def test_a_call_that_waits_by_itself_has_no_excuse() -> None:
    with Case(DictSubject()) as case:
        attempt = make_attempt(case.open(), "sleep", lambda: time.sleep(_WORK_S), limit_s=_LIMIT_S)

    assert attempt.own_s > 0.8 * _WORK_S


def test_a_call_is_late_by_its_own_time_only() -> None:
    with Case(DictSubject()) as case:
        path = FaultPath(case, {}, 1.0, case.space())
        late = path.limit_s + 1

        must_end_in_time(path, Attempt(operation="get", elapsed_s=late, delayed_s=1.5), "")
        with pytest.raises(Violation, match="took too long"):
            must_end_in_time(path, Attempt(operation="get", elapsed_s=late, delayed_s=0.1), "")


def test_a_process_with_a_thread_that_works_is_not_at_rest() -> None:
    released = threading.Event()

    def spin() -> None:
        while not released.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert wait_until(lambda: not is_at_rest(), _LIMIT_S)
    finally:
        released.set()
        thread.join(_LIMIT_S)


def test_threads_that_wait_leave_a_process_at_rest() -> None:
    released = threading.Event()
    thread = threading.Thread(target=released.wait)
    thread.start()
    try:
        assert wait_until(is_at_rest, _LIMIT_S)
    finally:
        released.set()
        thread.join(_LIMIT_S)


@pytest.mark.usefixtures("starved")
def test_a_busy_machine_leaves_repeated_work_its_time() -> None:
    limit, began_s, worked_s = WorkLimit(_WORK_S), time.monotonic(), time.thread_time()
    while not limit.is_over():
        pass

    assert time.monotonic() - began_s > 1.5 * _WORK_S
    assert time.thread_time() - worked_s > 0.8 * _WORK_S
