"""Observers of a page store, for traces and events. Without them, the page store does no extra work."""

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
    """A lookup that has ended. Its key spaces have no frame, as in `open_space`."""

    spaces: Sequence[KeySpace]
    hashes: Sequence[str]
    answers: Sequence[Sequence[bool | None]]
    """For each key space and page: True if the storage or the caller has the page, None if there was no
    answer."""
    failures: Sequence[Verdict | None]
    """For each key space, why the storage did not answer; None if it did."""
    prefix_pages: int | None
    """The longest usable prefix of a `match`. None for other lookups."""


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
    """The pages that are certainly no longer in the storage."""


@dataclass(frozen=True, slots=True)
class Clearance:
    """A `clear` that has ended."""

    space: KeySpace
    pages: int


class Activity:
    """A task of an engine that calls a page store, such as a prefetch."""

    def resume(self) -> AbstractContextManager[object]:
        """Return a context manager. In it, calls of this thread belong to the activity."""
        return nullcontext()

    def end(self, attributes: Attributes) -> None:
        """End the activity with its result. Only the first call counts."""


NO_ACTIVITY = Activity()


class _GuardedActivity(Activity):
    """An activity of an observer. Its exceptions are logged and affect no call."""

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
    """Base class for an object that is notified of each page store call that has ended.

    Override the methods that you need; here they do nothing. They run in the threads of the page
    store's callers, so they must not block. Their exceptions are logged. `began_ns` is the time at which
    the call began, from `time.monotonic_ns`.
    """

    def begin(self, name: str, attributes: Attributes) -> Activity:
        """Begin an activity. The engine's own thread makes this call."""
        return NO_ACTIVITY

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        """Handle a lookup."""

    def moved(self, move: Move, began_ns: int) -> None:
        """Handle a load or a save."""

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        """Handle a delete."""

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        """Handle a `clear`."""

    def stats(self) -> dict[str, int]:
        """Return the observer's own counters. `PageStore.stats` includes them."""
        return {}

    def close(self) -> None:
        """Release the observer's resources. The code that made the observer closes it. Idempotent."""


class Observers:
    """The observers of one page store. The object is false if there are none."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def now_ns(self) -> int:
        """Return the time at which a call begins, or 0 if there is no observer."""
        return time.monotonic_ns() if self._observers else 0

    def begin(self, name: str, attributes: Attributes) -> Activity:
        """Begin an activity of the first observer that offers one."""
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
        """Report a call to every observer. Log exceptions, which do not affect the call."""
        for observer in self._observers:
            with _logged():
                report(observer)
