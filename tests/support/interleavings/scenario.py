"""A scenario: some threads over the code under test, and what must hold whatever their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NoReturn, TypeVar

from interleavings.scheduler import Scheduler

T = TypeVar("T")


class Scenario:
    """One run of a scenario. A subclass makes the objects under test, and their threads.

    `set_up` runs without interruptions, then all `threads` run together, then `finish` runs beside the
    threads that the objects under test have started. A run must end with no thread left.
    """

    name: ClassVar[str]
    time_passes: ClassVar[bool] = True
    """False where the scenario judges deadlines: time limits pass only while no thread can run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ready = False
        """True once `set_up` has ended: `check` may look."""

    def replaced(self) -> AbstractContextManager[object]:
        """Return a context of the whole run, in which parts are replaced that open sockets or files."""
        return nullcontext()

    def set_up(self) -> None:
        """Make the objects under test."""

    def threads(self) -> Mapping[str, Callable[[], None]]:
        """Return the threads by name."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken. The call takes no lock.

        It is called at each switch, so that it sees all that another thread can see.
        """

    def finish(self) -> None:
        """Close the objects under test, and check what must hold at the end."""

    # --- for the threads -----------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options. The seed chooses it."""
        return options[self.scheduler.pick(len(options))]

    def require(self, condition: object, text: str) -> None:
        """End the run with a finding unless the condition is true.

        No code under test can catch this, as it can catch an AssertionError.
        """
        if not condition:
            self.fail(text)

    def fail(self, text: str) -> NoReturn:
        """End the run with a finding."""
        self.scheduler.fail("invariant", text)
