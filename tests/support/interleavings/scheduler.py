"""Runs one thread at a time, in virtual time, in an order that a strategy chooses.

Each controlled thread is a greenlet. It runs until a point: an operation on a lock, a condition, a
queue or a thread, a sleep, or a call of a storage. There the strategy chooses the next thread.
Neither threads of the operating system nor its clocks take part, so the same choices give the same
run.
"""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from greenlet import GreenletExit, getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    from interleavings.strategies import Strategy

CLOCK = -1
"""The choice to let the earliest time limit pass although threads could run."""
START_S = 1000.0
_TICK_S = 1e-6
_SETTLE_S = 1000.0
_OWN_FILES = ("/interleavings/", "/threading.py", "/concurrent/futures/", "/contextlib.py")


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise of the code under test that a run has broken."""

    kind: str
    text: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Step:
    """One uninterrupted part of a run: a thread, and the place where it stopped."""

    now_s: float
    thread: str
    place: str


@dataclass(slots=True, eq=False)
class Task:
    """A controlled thread."""

    number: int
    name: str
    run: Callable[[], None]
    greenlet: greenlet | None = None
    joiners: list[Task] = field(default_factory=list["Task"])
    waits_for: str = ""
    waiters: list[Task] | None = None
    """The list that this task is in while it waits."""
    deadline_s: float | None = None
    woken: bool = False
    done: bool = False
    choices: int = 0
    """How many choices were made while this task was the current one."""


class Scheduler:
    """The threads of one run. Use it for one run only."""

    def __init__(
        self,
        strategy: Strategy,
        *,
        check: Callable[[], None] | None = None,
        time_passes: bool = True,
        max_points: int = 50_000,
        traced: bool = False,
    ) -> None:
        """Prepare a run.

        Args:
            strategy: Chooses the next thread at each point.
            check: Raises AssertionError if the thread that just stopped has broken an invariant. It
                takes no lock.
            time_passes: True: time limits may pass while threads could run, as on a slow machine.
                False: they pass only if no thread can run.
            max_points: A run with more points counts as endless.
            traced: True: record `steps`.
        """
        self.now_s: float = START_S
        self.points: int = 0
        self.tasks: list[Task] = []
        self.finding: Finding | None = None
        self.deviations: dict[tuple[int, int], int] = {}
        """The choices that differ from the default, by task and the number of its choice."""
        self.steps: list[Step] = []
        self.time_passed: bool = False
        """True once a time limit has passed while a thread could run."""
        self.serial: int = 0
        """How many objects were made so far, which numbers them in order."""
        self._strategy = strategy
        self._check = check
        self._time_passes = time_passes
        self._max_points = max_points
        self._traced = traced
        self._ready: list[Task] = []
        self._sleeping: list[Task] = []
        self._hub: greenlet | None = None
        self._current: Task | None = None
        self._quiet = 0
        self._checking = self._ended = False

    # --- the run -------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True during the run."""
        return self._hub is not None

    @property
    def current(self) -> Task:
        """The task that runs."""
        assert self._current is not None, "no controlled thread runs"
        return self._current

    def run(self, main: Callable[[], None]) -> Finding | None:
        """Run `main` and the threads that it starts until all have ended. Return what was found."""
        self._hub = getcurrent()
        try:
            self.spawn("main", main)
            while self.finding is None and (task := self._next()) is not None:
                self._resume(task)
            if self.finding is None and self._unfinished():
                self.finding = Finding("deadlock", "no thread can run", self._waits())
        finally:
            self._end()
        return self.finding

    def spawn(self, name: str, run: Callable[[], None]) -> Task:
        """Add a thread."""
        task = Task(len(self.tasks), name, run)
        task.greenlet = greenlet(lambda: self._run(task), self._hub)
        self.tasks.append(task)
        self._ready.append(task)
        self._strategy.add(task)
        return task

    @contextmanager
    def uninterrupted(self) -> Generator[None]:
        """Make no choices during the `with` block: a thread runs until it waits."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # --- called by the controlled threads ------------------------------------------------------------

    def point(self, what: str) -> None:
        """Let the strategy choose the next thread."""
        if self._hub is None or self._checking:
            return
        if self._ended:
            raise GreenletExit
        if self.finding is not None:
            self._leave()
        self.points += 1
        if self.points > self._max_points:
            self.fail("endless", f"more than {self._max_points} points")
        if self._quiet or self._is_forced():
            return
        task = self._next()
        if task is not self._current:
            self._switch(task, what)

    def wait(self, waiters: list[Task], timeout_s: float | None, what: str) -> bool:
        """Wait for a call of `wake`, but no longer than `timeout_s`. Return False at the timeout."""
        if self._ended:
            raise GreenletExit
        if self._hub is None:
            raise RuntimeError(f"{what}: nobody can end this wait outside a run")
        if self.finding is not None:
            self._leave()
        task = self.current
        self._ready.remove(task)
        waiters.append(task)
        task.waiters, task.woken, task.waits_for = waiters, False, what
        if timeout_s is not None:
            task.deadline_s = self.now_s + max(0.0, timeout_s)
            self._sleeping.append(task)
        following = self._next()
        if following is not task:
            self._switch(following, what)
        return task.woken

    def settle(self) -> None:
        """Wait until the other threads have nothing left to do. Time passes only if all of them wait."""
        time_passes, self._time_passes = self._time_passes, False
        self.wait([], _SETTLE_S, "lets the other threads end their work")
        self._time_passes = time_passes

    def wake(self, waiters: list[Task], count: int | None = None) -> None:
        """Let the first `count` waiting threads go on, or all of them."""
        for task in waiters[:count]:
            task.woken = True
            self._make_ready(task)

    def pick(self, options: int) -> int:
        """Return a number below `options`, chosen in the same way as the next thread."""
        task = self.current
        key = (task.number, task.choices)
        task.choices += 1
        chosen = self._strategy.pick(key, options)
        if chosen:
            self.deviations[key] = chosen
        return chosen

    def fail(self, kind: str, text: str) -> NoReturn:
        """End the run with a finding."""
        stack = traceback.extract_stack()
        seen = [frame for frame in stack if not _is_own(frame.filename)]
        self.note(kind, text, "".join(traceback.format_list(seen)))
        self._leave()

    def note(self, kind: str, text: str, details: str = "") -> None:
        """Record a finding, which ends the run at the next point."""
        if self.finding is None and not self._ended:
            self.finding = Finding(kind, text, details)

    # --- choices -------------------------------------------------------------------------------------

    def _next(self) -> Task | None:
        """Return the task that runs next, or None if none can run."""
        while True:
            if not self._ready:
                if not self._sleeping:
                    return None
                self._pass_time()
                continue
            current, ready = self._current, self._ready
            default = current if current is not None and current in ready else ready[0]
            if self._quiet or self._is_forced():
                return default
            chooser = current or default
            key = (chooser.number, chooser.choices)
            chooser.choices += 1
            can_wait = bool(self._sleeping) and self._time_passes
            chosen = self._strategy.choose(key, default, ready, can_wait=can_wait)
            if chosen is not default:
                self.deviations[key] = CLOCK if chosen is None else chosen.number
            if chosen is not None:
                return chosen
            self.time_passed = True
            self._pass_time()

    def _is_forced(self) -> bool:
        """Return True if there is only one choice."""
        return len(self._ready) == 1 and not (self._sleeping and self._time_passes)

    def _pass_time(self) -> None:
        """Let the earliest time limit pass."""
        task = min(self._sleeping, key=_deadline_of)
        self.now_s = max(self.now_s, _deadline_of(task)) + _TICK_S
        self._make_ready(task)
        if self._traced:
            self.steps.append(Step(self.now_s, "(time)", f"{task.name} has waited long enough"))

    def _make_ready(self, task: Task) -> None:
        if task.waiters is not None:
            task.waiters.remove(task)
            task.waiters = None
        if task.deadline_s is not None:
            self._sleeping.remove(task)
            task.deadline_s = None
        task.waits_for = ""
        self._ready.append(task)

    # --- switches ------------------------------------------------------------------------------------

    def _switch(self, task: Task | None, what: str) -> None:
        """Let another task run, or return to the hub if none can. Return when this task runs again."""
        if self._traced:
            place = _place(sys._getframe(2))
            self.steps.append(Step(self.now_s, self.current.name, f"{place}: {what}"))
        self._check_step()
        if task is None or self.finding is not None:
            self._leave()
        here = self.current
        self._resume(task)
        self._current = here
        if self._ended:
            raise GreenletExit
        if self.finding is not None:
            self._leave()

    def _resume(self, task: Task) -> None:
        assert task.greenlet is not None
        self._current = task
        task.greenlet.switch()

    def _leave(self) -> NoReturn:
        """Return to the hub forever, because the run has ended."""
        assert self._hub is not None
        self._hub.switch()
        raise GreenletExit

    def _run(self, task: Task) -> None:
        self._current = task
        try:
            task.run()
        except GreenletExit:
            pass
        except BaseException as error:  # noqa: BLE001 - any error of a thread is a finding
            text = f"{task.name} ended with {type(error).__name__}: {error}"
            self.note("error", text, "".join(traceback.format_exception(error)))
        task.done = True
        if not self._ended:
            self._ready.remove(task)
            self.wake(task.joiners)
            self._check_step()
            if self._traced:
                self.steps.append(Step(self.now_s, task.name, "end"))

    def _check_step(self) -> None:
        if self._check is None or self.finding is not None or self._quiet:
            return
        self._checking = True
        try:
            self._check()
        except AssertionError as error:
            self.note("invariant", str(error), traceback.format_exc())
        finally:
            self._checking = False

    # --- the end -------------------------------------------------------------------------------------

    def _unfinished(self) -> list[Task]:
        return [task for task in self.tasks if not task.done]

    def _waits(self) -> str:
        return "\n".join(
            f"  {task.name} waits: {task.waits_for}"
            f" at {_place(task.greenlet.gr_frame if task.greenlet is not None else None)}"
            for task in self._unfinished()
        )

    def _end(self) -> None:
        """End all threads that have not ended."""
        self._ended = True
        for task in self._unfinished():
            for _ in range(100):
                if task.greenlet is None or task.greenlet.dead:
                    break
                self._current = task
                task.greenlet.throw()
        for task in self.tasks:
            task.greenlet = None
        self._hub = None
        self._current = None


def _deadline_of(task: Task) -> float:
    assert task.deadline_s is not None
    return task.deadline_s


def _is_own(path: str) -> bool:
    """Return True for files of the scheduler and the standard library."""
    return any(own in path for own in _OWN_FILES) and "/scenarios/" not in path


def _place(frame: FrameType | None) -> str:
    """Return the innermost place of a call stack that is in the code under test."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_own(name):
            return f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "its beginning"
