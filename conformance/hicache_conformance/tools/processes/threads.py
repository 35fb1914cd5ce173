"""Threads of a test: started, held half way through a page, waited for, and never left unnoticed."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from hicache_conformance.tools.processes.gates import HELD_LIMIT_S, Gate, GatedPage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

P = ParamSpec("P")
T = TypeVar("T")

_WAIT_LIMIT_S = 1.0
_SHORT_WAIT_LIMIT_S = 0.1
_RAPID_SWITCH_S = 1e-6
_POLL_S = 0.001


class Task(Generic[T]):
    """One function in a thread of its own."""

    def __init__(self, body: Callable[[], T], settled: threading.Condition) -> None:
        self._body = body
        self._settled = settled
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self.done = False
        threading.Thread(target=self._run, name="conformance", daemon=True).start()

    def result(self) -> T:
        """What the function returned, when it has; what it raised is raised here."""
        self.wait(None)
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def wait(self, limit_s: float | None) -> bool:
        """Whether it ended in time."""
        with self._settled:
            return self._settled.wait_for(lambda: self.done, limit_s)

    def _run(self) -> None:
        try:
            self._answers.append(self._body())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        with self._settled:
            self.done = True
            self._settled.notify_all()


class WaitLimit:
    """For how long a call may wait for a held one before it is taken for blocked by it.

    Where one was blocked others will be, and are waited for less.
    """

    def __init__(self) -> None:
        self.limit_s = _WAIT_LIMIT_S

    def adapt(self, *, blocked: bool) -> None:
        if blocked:
            self.limit_s = _SHORT_WAIT_LIMIT_S


class Threads:
    """The threads of one test. `with Threads() as crew:` opens every gate and waits for all at the end.

    A call that never returns is noticed by whoever watches the check's calls.
    """

    def __init__(self, wait_limit: WaitLimit | None = None) -> None:
        self._wait_limit = wait_limit or WaitLimit()
        self._settled = threading.Condition()
        self._tasks: list[Task[Any]] = []
        self._gates: list[Gate] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.open_gates()
        for task in self._tasks:
            if error is None:
                task.result()
            else:
                task.wait(HELD_LIMIT_S)

    def open_gates(self) -> None:
        """Let all calls go on. One that is held may wait for another one that is."""
        for gate in self._gates:
            gate.open()

    def start(self, body: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Task[T]:
        """Run `body` beside the caller."""
        task = Task(partial(body, *arguments, **options), self._settled)
        self._tasks.append(task)
        return task

    def attempt(self, body: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Task[T]:
        """The same; return when it is done, or seems to wait for a call that is held."""
        task = self.start(body, *arguments, **options)
        self._wait_limit.adapt(blocked=not task.wait(self._wait_limit.limit_s))
        return task

    def hold(
        self,
        call: Callable[[GatedPage], T],
        page: Page,
        *,
        before: int = 4,
        limit_s: float | None = None,
    ) -> HeldCall[T]:
        """Start `call` with a page; return when it is held there, is done, or waits for another one."""
        gate = Gate()
        self._gates.append(gate)
        task = self.start(call, GatedPage(page, gate, before=before))
        until_s = time.monotonic() + (limit_s or self._wait_limit.limit_s)
        while not (task.done or gate.reached.wait(_POLL_S) or time.monotonic() > until_s):
            pass
        return HeldCall(gate, task)


class HeldCall(Generic[T]):
    """A call that is held half way through a page."""

    def __init__(self, gate: Gate, task: Task[T]) -> None:
        self._gate = gate
        self._task = task

    @property
    def is_waiting(self) -> bool:
        """The store has not come to the gate, nor to an end."""
        return not (self._task.done or self._gate.reached.is_set())

    def release(self) -> T:
        """Let it go on; what it returned."""
        self._gate.open()
        return self._task.result()


def held_get(
    threads: Threads, probe: Probe, space: KeySpace, hashes: Sequence[str], **options: Any
) -> HeldCall[list[bytes | None]]:
    """A get in one call, held in front of one of the eight segments of the first page."""
    memory = probe.memory(space, len(hashes), 8)

    def get(first: GatedPage) -> list[bytes | None]:
        hits = probe.batch_get(space, hashes, [first, *memory.pages[1:]])
        found = zip(hits, memory.pages, strict=True)
        return [page.tobytes() if hit else None for hit, page in found]

    return threads.hold(get, memory.pages[0], **options)


def held_set(
    threads: Threads, probe: Probe, space: KeySpace, contents: Mapping[str, bytes], **options: Any
) -> HeldCall[list[bool]]:
    """A set in one call, held in front of one of the eight segments of the first page."""
    memory = probe.memory(space, len(contents), 8).filled_with(list(contents.values()))

    def set_pages(first: GatedPage) -> list[bool]:
        return probe.batch_set(space, list(contents), [first, *memory.pages[1:]])

    return threads.hold(set_pages, memory.pages[0], **options)


@contextmanager
def rapid_switching() -> Generator[None, None, None]:
    """Let the interpreter switch threads as often as it can, so that races show soon."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_RAPID_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def run_at_once(bodies: Sequence[Callable[[int], object]], *, turns: int, limit_s: float) -> int:
    """Call each of them `turns` times in a thread of its own, all at once; fewer times in the end if
    that takes longer than `limit_s`. How many calls that were.

    The first exception ends it, and is raised.
    """
    barrier = threading.Barrier(len(bodies))
    stopped = threading.Event()
    until_s = time.monotonic() + limit_s

    def run(body: Callable[[int], object]) -> int:
        barrier.wait(HELD_LIMIT_S)
        for turn in range(turns):
            if stopped.is_set() or time.monotonic() > until_s:
                return turn
            try:
                body(turn)
            except BaseException:
                stopped.set()
                raise
        return turns

    with rapid_switching(), Threads() as threads:
        return sum(task.result() for task in [threads.start(run, body) for body in bodies])
