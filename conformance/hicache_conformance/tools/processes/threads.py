"""Threads of a test that can be held half way through a page, and are always waited for."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from hicache_conformance.tools.processes.gates import HELD_LIMIT_S, Gate, GatedPage
from hicache_conformance.tools.processes.machine import WorkLimit

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
        """Wait for the end. Return the function's result, or raise its exception."""
        self.wait(None)
        if self._error is not None:
            raise self._error
        return self._answers[0]

    def wait(self, limit_s: float | None) -> bool:
        """Return whether the function ended in time."""
        with self._settled:
            return self._settled.wait_for(lambda: self.done, limit_s)

    def _run(self) -> None:
        try:
            self._answers.append(self._body())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        with self._settled:
            self.done = True
            self._settled.notify_all()


class WaitLimit:
    """How long a call may wait for a held one before it counts as blocked.

    After a blocked call the limit is shorter, because further calls of this store block too.
    """

    def __init__(self) -> None:
        self.limit_s = _WAIT_LIMIT_S

    def adapt(self, *, blocked: bool) -> None:
        """Shorten the limit after a blocked call."""
        if blocked:
            self.limit_s = _SHORT_WAIT_LIMIT_S


class Threads:
    """The threads of one test. Leaving `with Threads() as threads:` opens every gate, then waits.

    If a call never returns, the time limit of the check's calls ends it.
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
        """Let all calls continue, because a held call may wait for another held call."""
        for gate in self._gates:
            gate.open()

    def start(self, body: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Task[T]:
        """Run `body` in a thread."""
        task = Task(partial(body, *arguments, **options), self._settled)
        self._tasks.append(task)
        return task

    def attempt(self, body: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Task[T]:
        """Run `body` in a thread. Return when it has ended, or seems to wait for a held call."""
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
        """Start `call` with a gated page. Return when it is held, has ended, or waits for another
        call.
        """
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
        """Whether the call has reached neither the gate nor its end."""
        return not (self._task.done or self._gate.reached.is_set())

    def release(self) -> T:
        """Open the gate and return the result of the call."""
        self._gate.open()
        return self._task.result()


def held_get(
    threads: Threads, probe: Probe, space: KeySpace, hashes: Sequence[str], **options: Any
) -> HeldCall[list[bytes | None]]:
    """Start a get, and hold it before one of the eight segments of its first page."""
    memory = probe.memory(space, len(hashes), 8)

    def get(first: GatedPage) -> list[bytes | None]:
        hits = probe.batch_get(space, hashes, [first, *memory.pages[1:]])
        found = zip(hits, memory.pages, strict=True)
        return [page.tobytes() if hit else None for hit, page in found]

    return threads.hold(get, memory.pages[0], **options)


def held_set(
    threads: Threads, probe: Probe, space: KeySpace, contents: Mapping[str, bytes], **options: Any
) -> HeldCall[list[bool]]:
    """Start a set, and hold it before one of the eight segments of its first page."""
    memory = probe.memory(space, len(contents), 8).filled_with(list(contents.values()))

    def set_pages(first: GatedPage) -> list[bool]:
        return probe.batch_set(space, list(contents), [first, *memory.pages[1:]])

    return threads.hold(set_pages, memory.pages[0], **options)


@contextmanager
def rapid_switching() -> Generator[None, None, None]:
    """Switch threads as often as the interpreter can, so that races show soon."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_RAPID_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def run_at_once(bodies: Sequence[Callable[[int], object]], *, turns: int, limit_s: float) -> int:
    """Call each body up to `turns` times in its own thread, all at once. Return the number of calls.

    The calls end after `limit_s`, or later on a busy machine. The first exception ends them too, and
    is raised.
    """
    barrier = threading.Barrier(len(bodies))
    stopped = threading.Event()
    limit = WorkLimit(limit_s)

    def run(body: Callable[[int], object]) -> int:
        barrier.wait(HELD_LIMIT_S)
        for turn in range(turns):
            if stopped.is_set() or limit.is_over():
                return turn
            try:
                body(turn)
            except BaseException:
                stopped.set()
                raise
        return turns

    with rapid_switching(), Threads() as threads:
        return sum(task.result() for task in [threads.start(run, body) for body in bodies])
