"""Job results: what an engine gets for each job, and the queue from which it fetches results."""

from __future__ import annotations

import enum
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.backend_support.deadline import Deadline

logger = logging.getLogger(__name__)

R = TypeVar("R")


class JobKind(enum.Enum):
    """The kind of a job."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a load or a store that has ended. Nothing touches the engine's memory any more."""

    job_id: int
    verdicts: list[list[Verdict]]
    """One list for each batch, with one verdict for each page. Only pages that are OK were moved."""
    nbytes: int
    """The payload bytes of the OK pages."""
    elapsed_s: float
    """The time since a thread began the job. The time in the queue does not count."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of a lookup that has ended."""

    job_id: int
    verdicts: list[list[Verdict]]
    """One list for each query, with one verdict for each hash: OK, MISS, or why no answer came in time.
    A malformed query and those after it have no list."""

    @property
    def present(self) -> list[list[bool]]:
        """For each query, True for each hash that the store is known to have."""
        return [[verdict is Verdict.OK for verdict in found] for found in self.verdicts]


class ResultQueue(Generic[R]):
    """A queue of results of one kind of jobs, with a count of the running jobs. Thread-safe."""

    def __init__(self, kind: JobKind, on_finished: Callable[[JobKind], None] | None) -> None:
        self.kind = kind
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._under_way = 0
        self._results: list[R] = []

    def begin(self) -> None:
        """Count a job as running, until `finish` is called for it."""
        with self._changed:
            self._under_way += 1

    def finish(self, result: R) -> None:
        """Add the result of a job, notify the engine, and count the job as ended."""
        with self._changed:
            self._results.append(result)
        try:
            if self._on_finished is not None:
                self._on_finished(self.kind)
        except Exception:
            logger.exception("a finished %s could not be reported to the engine", self.kind.value)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def take(self) -> list[R]:
        """Return the results that no earlier call returned."""
        if not self._results:
            return []
        with self._changed:
            taken, self._results = self._results, []
        return taken

    def wait_idle(self, deadline: Deadline | None) -> bool:
        """Wait until no job is running. Return False if a job still runs at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._under_way, None if deadline is None else deadline.remaining_s()
            )
