"""Observers of a page store, for traces and events. A page store without one does nothing for them."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import TypeAlias

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.counters import Direction
    from hicache_storage.page_store.results import Outcome, Transfer, Verdict

    Attributes: TypeAlias = Mapping[str, str | int | float | bool]

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup that has ended. Key spaces have no frame, as `open_space` took them."""

    spaces: Sequence[KeySpace]
    hashes: Sequence[str]
    answers: Sequence[Sequence[bool | None]]
    """For each key space and page: True if the storage or the caller has the page, None without an
    answer."""
    failures: Sequence[Verdict | None]
    """For each key space, the reason why the storage did not answer."""
    prefix_pages: int | None
    """The longest usable prefix of a `match`; None for a `present`."""


@dataclass(frozen=True, slots=True)
class Move:
    """A load or a save that has ended."""

    direction: Direction
    transfers: Sequence[Transfer]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Deletion:
    """A delete that has ended."""

    space: KeySpace
    hashes: Sequence[str]
    gone: Sequence[str]
    """The pages that are certainly not in the storage any more."""


@dataclass(frozen=True, slots=True)
class Clearance:
    """All pages of a key space were removed."""

    space: KeySpace
    pages: int


class Activity:
    """A task of an engine in the course of which it calls a page store, such as a prefetch."""

    def resume(self) -> AbstractContextManager[object]:
        """Return a context in which the calls of this thread belong to the activity."""
        return nullcontext()

    def end(self, attributes: Attributes) -> None:
        """End the activity, with its result. Only the first call counts."""


NO_ACTIVITY = Activity()


class _GuardedActivity(Activity):
    """An activity of an observer, whose exceptions are logged: they change no call and no result."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    @contextmanager
    def resume(self) -> Generator[None, None, None]:
        with ExitStack() as outside:
            with _logged():
                context = self._activity.resume()
                context.__enter__()
                outside.callback(_leave, context)
            yield

    def end(self, attributes: Attributes) -> None:
        with _logged():
            self._activity.end(attributes)


def _leave(context: AbstractContextManager[object]) -> None:
    with _logged():
        context.__exit__(None, None, None)


@contextmanager
def _logged() -> Generator[None, None, None]:
    try:
        yield
    except Exception:
        logger.exception("an observer of the page store failed")


class Observer:
    """Learns of each call of a page store that has ended. Every method here does nothing.

    A page store calls the methods in the threads of its callers, so none may block. It logs their
    exceptions, and those of their activities. `began_ns` is the time of `time.time_ns` at which the
    call began.
    """

    def begin(self, name: str, attributes: Attributes) -> Activity:
        """Begin an activity, in the thread of the engine that asks for it."""
        return NO_ACTIVITY

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        """Note a lookup."""

    def moved(self, move: Move, began_ns: int) -> None:
        """Note a load or a save."""

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        """Note a delete."""

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        """Note that a key space was emptied."""

    def stats(self) -> dict[str, int]:
        """Return the observer's own counters, which those of the page store include."""
        return {}

    def close(self) -> None:
        """Release the observer's resources. The caller who made it closes it. Idempotent."""


class Observers:
    """The observers of one page store; false without one."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def now_ns(self) -> int:
        """Return the time at which a call begins; 0 without an observer."""
        return time.time_ns() if self._observers else 0

    def begin(self, name: str, attributes: Attributes) -> Activity:
        """Begin an activity of the first observer that has activities."""
        for observer in self._observers:
            with _logged():
                activity = observer.begin(name, attributes)
                if activity is not NO_ACTIVITY:
                    return _GuardedActivity(activity)
        return NO_ACTIVITY

    def stats(self) -> dict[str, int]:
        """Return the counters of all observers."""
        counters: dict[str, int] = {}
        for observer in self._observers:
            with _logged():
                counters |= observer.stats()
        return counters

    def notify(self, report: Callable[[Observer], None]) -> None:
        """Report a call to every observer. Log their exceptions: the call itself has its result."""
        for observer in self._observers:
            with _logged():
                report(observer)
