"""The scheduler of interleavings, short runs of its scenarios, and defects that these find."""

from __future__ import annotations

import _thread
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
from interleavings.defects import DEFECTS
from interleavings.explorer import Failure, Run, explore, run_once
from interleavings.patching import patched
from interleavings.scenario import Scenario
from interleavings.scenarios import SCENARIOS
from interleavings.scenarios.host_pool import HostPoolScenario
from interleavings.statements import with_points
from interleavings.strategies import PriorityWalk, RandomWalk, Replay, Strategy, of_seed

from hicache_storage.slot_allocator import SlotAllocator

pytestmark = pytest.mark.no_cover  # coverage takes the switches of greenlets for calls and returns

SUPPORT = Path(__file__).parent / "support"
DIGESTS = """
import sys
from interleavings.explorer import run_once
from interleavings.patching import patched
from interleavings.scenarios import SCENARIOS
from interleavings.scenarios.host_pool import HostPoolScenario
from interleavings.statements import with_points
from interleavings.strategies import of_seed

with patched() as patches:
    for name, scenario in SCENARIOS.items():
        for seed in range(4):
            print(name, seed, run_once(patches, scenario, of_seed(seed)).digest)
"""
SHORT = {
    "handoff": 25,
    "controller": 150,
    "write-back": 150,
    "job-runner": 100,
    "breaker": 100,
    "page-store": 200,
    "impatience": 200,
    "host-pool": 300,
    "tiers": 300,
    "stripes": 300,
    "memory": 500,
    "victims": 500,
    "executor": 500,
    "single-flight": 500,
    "connection-pool": 500,
}
"""The seeds of the scenarios whose runs take long. The others have 1,000."""


REAL_LOCK = type(threading.Lock())


class LostUpdate(Scenario):
    """Two threads add 1 to a number. Each reads and writes it in two separate holds of a lock."""

    name = "lost-update"

    def set_up(self) -> None:
        self.lock = threading.Lock()
        self.count = 0

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"first": self._add, "second": self._add}

    def finish(self) -> None:
        self.require(self.count == 2, "an update was lost")

    def _add(self) -> None:
        with self.lock:
            count = self.count
        with self.lock:
            self.count = count + 1


class LockOrder(Scenario):
    """Two threads take two locks in different orders."""

    name = "lock-order"

    def set_up(self) -> None:
        self.first, self.second = threading.Lock(), threading.Condition()

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"one": self._first_then_second, "two": self._second_then_first}

    def _first_then_second(self) -> None:
        with self.first, self.second:
            pass

    def _second_then_first(self) -> None:
        with self.second, self.first:
            pass


class Unlocked(HostPoolScenario):
    """The slots of a host pool without their lock."""

    def set_up(self) -> None:
        super().set_up()
        vars(self.pool._allocation)["_lock"] = nullcontext()

    def check(self) -> None:
        """Check nothing: the threads themselves do."""


class OneThread(Scenario):
    """A scenario of one thread, which a test gives."""

    name = "one-thread"
    time_passes = False

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {"thread": self.act}

    def act(self) -> None:
        raise NotImplementedError


def run_default(scenario: type[Scenario]) -> Run:
    """Run a scenario with only those switches of threads that are forced."""
    with patched() as patches:
        return run_once(patches, scenario, Replay({}))


def found_by(scenario: type[Scenario], strategy: Callable[[int], Strategy], seeds: int) -> bool:
    """Return whether a strategy finds something with any of the seeds."""
    with patched() as patches:
        return any(
            run_once(patches, scenario, strategy(seed)).finding is not None for seed in range(seeds)
        )


def failure_of(scenario: type[Scenario]) -> Failure:
    """Return what the first seeds find."""
    failure = explore(scenario, range(100)).failure
    assert failure is not None
    return failure


class TestScheduler:
    @pytest.mark.parametrize("strategy", [RandomWalk, PriorityWalk])
    def test_a_lost_update_is_found(self, strategy: Callable[[int], Strategy]) -> None:
        assert found_by(LostUpdate, strategy, 50)

    def test_without_a_switch_no_update_is_lost(self) -> None:
        assert run_default(LostUpdate).finding is None

    def test_a_deadlock_is_found_and_names_the_waits(self) -> None:
        finding = failure_of(LockOrder).shrunk.finding

        assert finding is not None
        assert finding.kind == "deadlock"
        assert "one waits: waits for a lock" in finding.details

    def test_a_thread_that_is_left_is_found(self) -> None:
        class Left(OneThread):
            def act(self) -> None:
                threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()

        finding = run_default(Left).finding

        assert finding is not None
        assert (finding.kind, "left waits" in finding.details) == ("deadlock", True)

    def test_an_error_that_ends_a_thread_is_found(self) -> None:
        class Broken(OneThread):
            def act(self) -> None:
                raise KeyError("page")

        assert "thread ended with KeyError: 'page'" in str(run_default(Broken).finding)

    def test_a_logged_error_is_found(self) -> None:
        class Logged(OneThread):
            def act(self) -> None:
                logging.getLogger(__name__).error("the store is broken")
                threading.Lock().acquire()

        assert "the store is broken" in str(run_default(Logged).finding)

    def test_a_requirement_cannot_be_caught(self) -> None:
        class Caught(OneThread):
            def act(self) -> None:
                try:
                    self.require(0, "pages are wrong")
                except Exception:  # noqa: BLE001 - as the code under test does
                    return

        assert "pages are wrong" in str(run_default(Caught).finding)

    def test_time_passes_without_a_wait(self) -> None:
        elapsed: list[float] = []

        class Sleeps(OneThread):
            def act(self) -> None:
                began_s = time.monotonic()
                time.sleep(3600)
                assert not threading.Event().wait(400)
                elapsed.append(time.monotonic() - began_s)

        began_s = time.monotonic()

        assert run_default(Sleeps).finding is None
        assert elapsed == [pytest.approx(4000)]
        assert time.monotonic() - began_s < 60

    def test_time_limits_of_the_standard_library_pass(self) -> None:
        class Waits(OneThread):
            def act(self) -> None:
                lock, queue, future = threading.Lock(), SimpleQueue[int](), Future[int]()
                lock.acquire()
                assert not lock.acquire(timeout=1)
                with pytest.raises(Empty):
                    queue.get(timeout=1)
                assert not wait([future], 1).done
                with pytest.raises(TimeoutError):
                    future.result(1)
                assert not threading.Semaphore(0).acquire(timeout=1)

        assert run_default(Waits).finding is None

    def test_the_library_is_the_real_one_afterwards(self) -> None:
        def replaced() -> list[object]:
            return [threading.Lock, threading.Thread, time.monotonic, vars(Future).get("__hash__")]

        before = replaced()

        run_default(LostUpdate)

        assert replaced() == before

    def test_threads_outside_a_run_have_real_locks(self) -> None:
        made: list[object] = []

        class Makes(OneThread):
            def act(self) -> None:
                ended = _thread.allocate_lock()
                ended.acquire()
                _thread.start_new_thread(make, (ended,))
                ended.acquire()
                made.append(threading.Lock())

        def make(ended: _thread.LockType) -> None:
            made.append(threading.Lock())
            ended.release()

        run_default(Makes)

        assert [isinstance(each, REAL_LOCK) for each in made] == [True, False]


class TestStatements:
    def test_a_lock_that_is_missing_is_found_by_points_before_statements_alone(self) -> None:
        assert explore(Unlocked, range(50)).failure is None
        assert explore(Unlocked, range(50), statements=True, shrinks=False).failure is not None

    def test_the_functions_are_as_before_afterwards(self) -> None:
        before = SlotAllocator.allocate.__code__

        with patched() as patches, with_points(patches) as functions:
            assert functions > 500
            assert SlotAllocator.allocate.__code__ is not before

        assert SlotAllocator.allocate.__code__ is before


class TestExplorer:
    @pytest.mark.parametrize("seed", [0, 1, 6, 7])
    @pytest.mark.parametrize("name", SCENARIOS)
    def test_a_seed_gives_the_same_run_again(self, name: str, seed: int) -> None:
        with patched() as patches:
            first, second = (
                run_once(patches, SCENARIOS[name], of_seed(seed)).digest for _ in range(2)
            )

        assert first == second

    def test_a_seed_gives_the_same_run_in_another_process(self) -> None:
        runs = [
            subprocess.run(
                [sys.executable, "-c", DIGESTS],
                env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTHONHASHSEED": hash_seed},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for hash_seed in ("1", "2")
        ]

        assert runs[0] == runs[1]
        assert len(runs[0].splitlines()) == 4 * len(SCENARIOS)

    def test_the_recorded_choices_repeat_a_run(self) -> None:
        failure = failure_of(LostUpdate)

        with patched() as patches:
            again = run_once(patches, LostUpdate, Replay(failure.first.deviations))

        assert again.finding == failure.first.finding

    def test_a_lost_update_needs_one_choice(self) -> None:
        assert len(failure_of(LostUpdate).shrunk.deviations) == 1

    def test_a_failure_shows_the_threads_in_order_and_the_command(self) -> None:
        text = str(failure_of(LostUpdate))

        first = text.index("first ")
        assert first < text.index("test_interleavings.py", first) < text.index("second ", first)
        assert text.splitlines()[-1].startswith("again: make explore SCENARIO=lost-update SEED=")


class TestScenarios:
    @pytest.mark.parametrize("name", SCENARIOS)
    def test_the_first_seeds_find_nothing(self, name: str) -> None:
        report = explore(SCENARIOS[name], range(SHORT.get(name, 1000)))

        assert report.failure is None, str(report.failure)


RARE = {"copies-undone-by-engines", "moves-that-begin-during-a-removal", "moves-ignore-removals"}
"""Defects that only one of some thousand orders shows."""


class TestDefects:
    @pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=pytest.mark.long if name in RARE else ()) for name in DEFECTS],
    )
    def test_a_defect_that_is_put_back_is_found(self, name: str) -> None:
        defect = DEFECTS[name]

        with defect.put_back():
            report = explore(SCENARIOS[defect.scenario], range(4000), shrinks=False)

        assert report.failure is not None
        assert defect.found in str(report.failure.first.finding)
        assert explore(SCENARIOS[defect.scenario], [report.failure.seed]).failure is None
