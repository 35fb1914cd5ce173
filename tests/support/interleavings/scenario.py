"""A scenario: some threads over the code under test, and what must hold in whatever order they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NoReturn, TypeVar

from interleavings.scheduler import Scheduler

T = TypeVar("T")


class Scenario:
    """One run of a scenario. A subclass makes the objects under test, and their threads.

    `set_up` runs without interruptions, then all `threads` run together, then `finish` runs beside
    the threads that the objects under test have started. When a run ends, no thread may be left.
    """

    name: ClassVar[str]
    time_passes: ClassVar[bool] = True
    """False if the scenario tests deadlines: time limits then pass only while no thread can run."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.ready = False
        """True once `set_up` has ended, so that `check` may look."""

    def replaced(self) -> AbstractContextManager[object]:
        """Return a context for the whole run. It replaces parts that open sockets or files."""
        return nullcontext()

    def set_up(self) -> None:
        """Make the objects under test."""

    def threads(self) -> Mapping[str, Callable[[], None]]:
        """Return the threads by name."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Take no lock.

        This is called at each switch, so it sees everything that another thread can see.
        """

    def finish(self) -> None:
        """Close the objects under test, and check what must hold at the end."""

    # --- for the threads -----------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options, which the seed chooses."""
        return options[self.scheduler.pick(len(options))]

    def require(self, condition: object, text: str) -> None:
        """End the run with a finding unless the condition is true.

        The code under test can't catch this, unlike an AssertionError.
        """
        if not condition:
            self.fail(text)

    def fail(self, text: str) -> NoReturn:
        """End the run with a finding."""
        self.scheduler.fail("invariant", text)
