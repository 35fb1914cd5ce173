"""Answer an engine's lookups in separate threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.integrations._job_results import LookupResult
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.integrations._job_results import ResultQueue
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_THREADS = 2
_Verdicts: TypeAlias = "dict[KeySpace, dict[str, Verdict]]"


class _LookupJob:
    __slots__ = ("deadline", "job_id", "queries")

    def __init__(
        self, job_id: int, queries: Sequence[tuple[KeySpace, Sequence[str]]], timeout_s: float
    ) -> None:
        self.job_id = job_id
        self.queries = queries
        self.deadline = Deadline(timeout_s)


class LookupQueue:
    """The lookups of a runner. Thread-safe.

    Each of two threads, `hicache-lookup-0` and `-1`, takes all waiting lookups, and calls
    `PageStore.lookup` once for each key space. The oldest of these lookups sets the deadline for all of
    them, and a page without an answer by then counts as missing. A lookup's deadline begins with its
    submission.
    """

    def __init__(
        self,
        store: PageStore,
        results: ResultQueue[LookupResult],
        timeout_s: float,
    ) -> None:
        self.counters = Counters()
        self._store = store
        self._results = results
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: deque[_LookupJob] = deque()
        self._closed = False
        for number in range(_THREADS):
            name = f"hicache-lookup-{number}"
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job_id: int, queries: Sequence[tuple[KeySpace, Sequence[str]]]) -> None:
        """Add a lookup. The call never blocks.

        After `stop`, every page of a lookup counts as missing.
        """
        job = _LookupJob(job_id, queries, self._timeout_s)
        self._results.begin()
        with self._changed:
            if not self._closed:
                self._waiting.append(job)
                self._changed.notify()
                return
        self._finish(job, {})

    def stop(self) -> None:
        """End the threads. The pages of waiting lookups count as missing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while jobs := self._next():
            self._answer(jobs)
            del jobs

    def _next(self) -> list[_LookupJob]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            jobs = list(self._waiting)
            self._waiting.clear()
            return jobs

    def _answer(self, jobs: list[_LookupJob]) -> None:
        try:
            answers = {} if self._closed else self._query(jobs)
        except BaseException as error:  # noqa: BLE001 - one malformed hash fails the whole call
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([job])
                return
            logger.warning("a lookup failed: %s: %s", type(error).__name__, error)
            answers = {}
        for job in jobs:
            self._finish(job, answers)

    def _query(self, jobs: list[_LookupJob]) -> _Verdicts:
        """Return the verdict of each page hash in each key space."""
        deadline = jobs[0].deadline
        answers: _Verdicts = {}
        for job in jobs:
            for space, hashes in job.queries:
                answers.setdefault(space, {}).update(dict.fromkeys(hashes, Verdict.TIMEOUT))
        for space in answers:
            hashes = list(answers[space])
            if not deadline.passed():
                try:
                    found = self._store.lookup(space, hashes, timeout_s=deadline.remaining_s())
                except UnsupportedOperation:  # logged when its pages are first stored
                    found = [Verdict.UNAVAILABLE] * len(hashes)
                answers[space] = dict(zip(hashes, found, strict=True))
        self._count(answers)
        return answers

    def _count(self, answers: _Verdicts) -> None:
        for found in answers.values():
            values = list(found.values())
            present, absent = values.count(Verdict.OK), values.count(Verdict.MISS)
            self.counters.add("lookup_pages", len(values))
            self.counters.add("lookup_pages_present", present)
            self.counters.add("lookup_pages_unanswered", len(values) - present - absent)

    def _finish(self, job: _LookupJob, answers: _Verdicts) -> None:
        verdicts: list[list[Verdict]] = []
        otherwise = Verdict.UNAVAILABLE if self._closed else Verdict.ERROR
        try:
            for space, hashes in job.queries:
                found = answers.get(space, {})
                verdicts.append([found.get(page_hash, otherwise) for page_hash in hashes])
        except Exception:
            logger.exception("lookup %r is malformed", job.job_id)
        self.counters.add("lookup_jobs")
        self._results.finish(LookupResult(job.job_id, verdicts))
