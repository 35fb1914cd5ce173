"""Scenarios for the helpers of backends: executor, single flight, shared resource."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial

from hicache_storage.backend_support.executor import DaemonExecutor, call_when_done
from hicache_storage.backend_support.shared_resource import SharedResource
from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import StorageClosed
from interleavings.scenario import Scenario

_EPSILON_S = 0.001


class ExecutorScenario(Scenario):
    """Tasks are submitted and cancelled, and the executor is closed, in any order.

    Each future ends. A task runs once, unless its future was cancelled or the executor was closed.
    """

    name = "executor"

    def set_up(self) -> None:
        self.executor = DaemonExecutor("worker", 2)
        self.runs: Counter[int] = Counter()
        self.futures: list[Future[int]] = []
        self.groups: list[Future[None]] = []

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "first": lambda: self._submit(0),
            "second": lambda: self._submit(10),
            "closer": self._close,
        }

    def finish(self) -> None:
        self.require(self.executor.close(1000.0) or self.scheduler.time_passed, "a task still runs")
        self.scheduler.settle()
        self.require(all(each.done() for each in self.futures), "a task has not ended")
        self.require(all(each.done() for each in self.groups), "a group of tasks has not ended")
        for number, future in enumerate(self.futures):
            if not future.cancelled() and future.exception() is None:
                self.require(self.runs[future.result()] == 1, f"task {number} did not run once")
        self.require(max(self.runs.values(), default=0) <= 1, "a task ran twice")
        self.require(not self.executor.waiting_count, "a task is left in the queue")

    def _submit(self, first: int) -> None:
        futures = [self.executor.submit(partial(self._task, first + n)) for n in range(3)]
        self.futures += futures
        done: Future[None] = Future()
        call_when_done(futures, lambda: done.set_result(None))
        self.groups.append(done)
        if self.pick((False, True)):
            futures[self.pick((0, 1, 2))].cancel()
        wait(futures, self.pick((None, 1.0)))

    def _task(self, number: int) -> int:
        self.runs[number] += 1
        if self.pick((False, True)):
            time.sleep(1.0)
        return number

    def _close(self) -> None:
        if self.pick((False, True)):
            self.executor.close(self.pick((0.0, 5.0)))


class SingleFlightScenario(Scenario):
    """Callers with time limits share a call that may take longer, or fail.

    One call runs at a time. A caller waits no longer than its limit, and gets the result of a call
    that was in flight while it waited.
    """

    name = "single-flight"
    time_passes = False

    def set_up(self) -> None:
        self.running = self.calls = 0
        self.flight = SingleFlight("flight", self._call)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {f"caller-{number}": self._ask for number in range(3)}

    def check(self) -> None:
        assert self.running <= 1, "two calls are in flight"

    def finish(self) -> None:
        self.flight.wait_idle(100.0)
        self.require(not self.running, "a call is in flight")
        self.require(self.flight.age_s() == 0.0, "an ended call has an age")

    def _call(self) -> int:
        self.running += 1
        self.calls += 1
        number = self.calls
        time.sleep(self.pick((0.0, 1.0, 5.0)))
        self.running -= 1
        if self.pick((False, False, True)):
            raise ValueError(number)
        return number

    def _ask(self) -> None:
        for _ in range(3):
            before, began_s = self.calls, time.monotonic()
            limit_s = self.pick((0.5, 2.0, 10.0))
            ended = self.flight.wait(limit_s)
            took_s = time.monotonic() - began_s
            self.require(took_s <= limit_s + _EPSILON_S, f"a caller waited {took_s} s")
            if ended is None:
                continue
            error = ended.exception()
            number = error.args[0] if error is not None else ended.result()
            self.require(number >= before, "a caller got the end of a call of before")


class SharedResourceScenario(Scenario):
    """Calls use a resource while another thread closes it.

    No call gets a resource that is closed, and the resource is closed once.
    """

    name = "shared-resource"

    def set_up(self) -> None:
        self.closes = 0
        self.uses = 0
        self.resource = SharedResource(lambda: "value", close=self._note_close)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "first": self._use,
            "second": self._use,
            "closer": self.resource.close,
            "other": self.resource.close,
        }

    def check(self) -> None:
        assert self.closes <= 1, "the resource was closed twice"

    def finish(self) -> None:
        self.require(self.closes == 1, f"the resource was closed {self.closes} times")

    def _note_close(self, _: str) -> None:
        self.require(not self.uses, "the resource is closed while a call uses it")
        self.closes += 1

    def _use(self) -> None:
        for _ in range(3):
            try:
                with self.resource.use():
                    self.uses += 1
                    self.require(not self.closes, "a call uses a closed resource")
                    self.scheduler.point("uses the resource")
                    self.require(not self.closes, "a call uses a closed resource")
                    self.uses -= 1
            except StorageClosed:
                return
