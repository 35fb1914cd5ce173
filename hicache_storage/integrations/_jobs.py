"""Run an engine's lookups, loads and stores on a page store. Each job has a deadline.

The engine's thread submits jobs and fetches their results. That thread never waits, and gets no errors.
A job is a call that the page store begins, so the page store's threads do the work. If pages are
written at their second use, the thread `hicache-admission` keeps the sketch of them in the store.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, cast

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageClosed, UnsupportedOperation
from hicache_storage.integrations._job_results import (
    JobKind,
    JobResult,
    LookupResult,
    ResultQueue,
)
from hicache_storage.integrations._switch_interval import SwitchIntervalSettings
from hicache_storage.integrations._write_admission import WriteAdmission
from hicache_storage.page_store.admission import AdmissionSettings
from hicache_storage.page_store.observer import NO_ACTIVITY
from hicache_storage.page_store.results import Transfer, Verdict
from hicache_storage.settings import ByteSize, Field, PositiveSeconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import Outcome, PageStore
    from hicache_storage.page_store.begun import Begun
    from hicache_storage.page_store.observer import Activity

__all__ = ["JobKind", "JobResult", "JobRunner", "JobSettings", "LookupResult"]

logger = logging.getLogger(__name__)

_LAST_WAIT_S = 1.0


class JobSettings(SwitchIntervalSettings):
    """The settings of a job runner. Each engine's adapter has these fields among its own settings."""

    lookup_timeout_s: PositiveSeconds = 0.5
    """The deadline of a lookup, from its submission. A page without an answer by then is missing."""
    load_timeout_s: PositiveSeconds = 2.0
    """The deadline of a load, from its submission. Pages that have not arrived by then are TIMEOUT."""
    store_timeout_s: PositiveSeconds = 10.0
    """The deadline of a store, from its submission."""
    queued_nbytes: ByteSize = Field(default=256 << 20, gt=0)
    """The limit for the payload bytes of stores that have not begun. A store that exceeds it is dropped
    and counted, unless no other store waits. The page store's private memory has the same limit in each
    direction."""
    admission: AdmissionSettings = Field(default_factory=AdmissionSettings)
    """Which pages are written. The others get the verdict NOT_ADMITTED."""
    tracing: bool = False
    """Whether the page store makes OpenTelemetry spans. Needs the extra `otel`."""


class JobRunner:
    """The jobs of one engine. Thread-safe. Close the page store yourself.

    Each kind of jobs has its own ids. The runner reports each job once, at its deadline at the latest.
    Nothing touches the job's memory then any more.
    """

    def __init__(
        self,
        store: PageStore,
        settings: JobSettings,
        *,
        on_finished: Callable[[JobKind], None] | None = None,
        owner: KeySpace | None = None,
    ) -> None:
        """Take jobs for a page store.

        Args:
            store: The page store.
            settings: The runner's deadlines and memory limits.
            on_finished: A function that any thread calls once for each result. If a job ends at once,
                the thread that calls `submit_*` calls it.
            owner: A key space of the engine's pages. The store keeps the sketch of `admission` under it.
                None: the key space of the first store, for which the sketch is not restored yet.
        """
        settings.shorten_switch_interval()
        self._store = store
        self._settings = settings
        self._admission = WriteAdmission(store, settings.admission)
        if owner is not None:
            self._admission.start(owner)
        self._lookups = ResultQueue[LookupResult](JobKind.LOOKUP, on_finished)
        self._loads = ResultQueue[JobResult](JobKind.LOAD, on_finished)
        self._stores = ResultQueue[JobResult](JobKind.STORE, on_finished)
        self._counters = Counters()
        self._saves: dict[Future[Outcome], int] = {}
        """The payload bytes of each store that has not ended."""
        self._closed = False

    # --- the engine's thread -------------------------------------------------------------------------

    def submit_lookup(self, job_id: int, queries: Sequence[tuple[KeySpace, Sequence[str]]]) -> None:
        """Submit a lookup of which pages the store has. The call never blocks or raises."""
        self._lookups.begin()
        if self._closed:
            closed: Future[list[list[Verdict]]] = Future()
            closed.set_exception(StorageClosed("the engine has ended"))
            self._end_lookup(job_id, queries, closed)
            return
        begun = self._store.begin_lookup(queries, timeout_s=self._settings.lookup_timeout_s)
        begun.add_done_callback(partial(self._end_lookup, job_id, queries))

    def submit_load(self, job_id: int, batches: Sequence[Transfer]) -> None:
        """Submit a load of pages into the engine's memory. The call never blocks or raises."""
        self._loads.begin()
        job = _Job(job_id, batches, self._store.begin_activity("load_job", {}))
        if self._closed:
            self._end(self._loads, job, job.all(Verdict.UNAVAILABLE))
            return
        begun = self._store.begin_load(
            batches, timeout_s=self._settings.load_timeout_s, activity=job.activity
        )
        begun.add_done_callback(partial(self._end_move, self._loads, job))

    def submit_store(self, job_id: int, batches: Sequence[Transfer]) -> None:
        """Submit a store of pages from the engine's memory. The call never blocks or raises.

        The pages must not change until the job is reported. If the job does not fit in the queue, its
        pages are REFUSED.
        """
        self._stores.begin()
        job = _Job(job_id, batches, self._store.begin_activity("store_job", {}))
        nbytes = job.nbytes()
        waiting_nbytes = self._waiting_nbytes()
        refusal = None
        if self._closed:
            refusal = Verdict.UNAVAILABLE
        elif waiting_nbytes and waiting_nbytes + nbytes > self._settings.queued_nbytes:
            refusal = Verdict.REFUSED
            self._counters.add("store_jobs_dropped")
        if refusal is not None:
            self._end(self._stores, job, job.all(refusal))
            return
        try:
            self._admit(job)
        except Exception as error:  # noqa: BLE001 - the job is malformed
            self._end(self._stores, job, job.all(self._verdict(JobKind.STORE, error)))
            return
        begun = self._store.begin_save(
            job.moved, timeout_s=self._settings.store_timeout_s, activity=job.activity
        )
        self._saves[begun] = nbytes
        begun.add_done_callback(partial(self._end_move, self._stores, job))

    def finished_lookups(self) -> list[LookupResult]:
        """Return the results of lookups that ended since the last call."""
        return self._lookups.take()

    def finished_loads(self) -> list[JobResult]:
        """Return the results of loads that ended since the last call."""
        return self._loads.take()

    def finished_stores(self) -> list[JobResult]:
        """Return the results of stores that ended since the last call."""
        return self._stores.take()

    # --- for any thread ------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job has ended. Return False if a job is still running after `timeout_s`.

        Without a `timeout_s`, the deadlines of the jobs end the wait.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        return all(each.wait_idle(deadline) for each in (self._lookups, self._loads, self._stores))

    def stats(self) -> dict[str, int]:
        """Return the counters since the start, and the memory that is in use now.

        A counter appears with its first count: jobs of each kind (`load_jobs`), pages of loads and
        stores by verdict (`store_pages_refused`), `store_jobs_dropped`, `lookup_pages`,
        `lookup_pages_present`, `lookup_pages_unanswered`, `not_admitted_first_use`,
        `not_admitted_rate`, `space_open_failures`. The present values are
        `queued_store_nbytes`, `private_nbytes`, `private_nbytes_used`, `open_spaces`.
        """
        private_nbytes, private_nbytes_used = self._store.private_nbytes()
        open_spaces, space_open_failures = self._store.open_spaces
        return {
            **self._counters.snapshot(),
            **self._admission.stats(),
            "queued_store_nbytes": self._waiting_nbytes(),
            "private_nbytes": private_nbytes,
            "private_nbytes_used": private_nbytes_used,
            "open_spaces": open_spaces,
            "space_open_failures": space_open_failures,
        }

    def close(self, timeout_s: float = 15.0) -> bool:
        """End all jobs: those that have not ended after `timeout_s` are given up. Idempotent.

        Return True if nothing touches the engine's memory any more, now or later. Jobs that are
        submitted later end at once, without calling the store.
        """
        deadline = Deadline(timeout_s)
        self._closed = True
        self.drain(timeout_s)
        self._admission.close(deadline.remaining_s())
        self._store.end_begun()
        return self.drain(_LAST_WAIT_S)

    # --- parts ---------------------------------------------------------------------------------------

    def _waiting_nbytes(self) -> int:
        """Return the payload bytes of the stores that have not begun."""
        return sum(nbytes for begun, nbytes in tuple(self._saves.items()) if not begun.running())

    def _admit(self, job: _Job) -> None:
        """Drop the pages that are not admitted."""
        if not self._admission.is_enabled:
            return
        kept: list[list[bool]] = []
        for batch in job.batches:
            self._admission.start(batch.space)
            kept.append(
                self._admission.admit(batch.hashes, batch.space.page_nbytes, batch.space.id)
            )
        job.keep(kept)

    def _end_lookup(
        self,
        job_id: int,
        queries: Sequence[tuple[KeySpace, Sequence[str]]],
        begun: Future[list[list[Verdict]]],
    ) -> None:
        verdicts: list[list[Verdict]] = []
        try:
            verdicts = begun.result()
        except BaseException as error:  # noqa: BLE001 - no error reaches the engine's thread
            verdict = self._verdict(JobKind.LOOKUP, error)
            with suppress(Exception):  # a query may be malformed
                verdicts = [[verdict] * len(hashes) for _, hashes in queries]
        pages = sum(map(len, verdicts))
        present, absent = (
            sum(of_query.count(verdict) for of_query in verdicts)
            for verdict in (Verdict.OK, Verdict.MISS)
        )
        self._counters.add("lookup_jobs")
        self._counters.add("lookup_pages", pages)
        self._counters.add("lookup_pages_present", present)
        self._counters.add("lookup_pages_unanswered", pages - present - absent)
        self._lookups.finish(LookupResult(job_id, verdicts))

    def _end_move(self, results: ResultQueue[JobResult], job: _Job, begun: Future[Outcome]) -> None:
        self._saves.pop(begun, None)
        try:
            verdicts = job.spread(begun.result().verdicts)
        except BaseException as error:  # noqa: BLE001 - as above
            verdicts = job.all(self._verdict(results.kind, error))
        self._end(results, job, verdicts, time.monotonic() - cast("Begun[Outcome]", begun).began_s)

    def _end(
        self,
        results: ResultQueue[JobResult],
        job: _Job,
        verdicts: list[list[Verdict]],
        elapsed_s: float = 0.0,
    ) -> None:
        result = JobResult(job.job_id, verdicts, job.moved_nbytes(verdicts), elapsed_s)
        tally: Counter[Verdict] = Counter()
        for of_batch in verdicts:
            tally.update(of_batch)
        kind = results.kind.value
        self._counters.add(f"{kind}_jobs")
        for verdict, pages in tally.items():
            self._counters.add(f"{kind}_pages_{verdict.value}", pages)
        try:
            if job.activity is not NO_ACTIVITY:
                per_verdict = {f"pages.{verdict.value}": pages for verdict, pages in tally.items()}
                job.activity.end({"pages": tally.total(), "nbytes": result.nbytes, **per_verdict})
        finally:
            results.finish(result)

    def _verdict(self, kind: JobKind, error: BaseException) -> Verdict:
        """Log an error, and return the verdict of its pages."""
        logger.warning("a %s failed: %s: %s", kind.value, type(error).__name__, error)
        is_refused = isinstance(error, (StorageClosed, UnsupportedOperation))
        return Verdict.UNAVAILABLE if is_refused else Verdict.ERROR


class _Job:
    """A load or a store that has not been reported."""

    def __init__(self, job_id: int, batches: Sequence[Transfer], activity: Activity) -> None:
        self.job_id = job_id
        self.batches = batches
        self.moved = batches
        """The pages that are offered to the page store."""
        self.activity = activity
        self._kept: list[list[bool]] = []

    def keep(self, kept: list[list[bool]]) -> None:
        """Move only some pages of each batch. The others get NOT_ADMITTED."""
        self._kept = kept
        self.moved = [
            Transfer(
                batch.space,
                list(compress(batch.hashes, of_batch)),
                list(compress(batch.pages, of_batch)),
            )
            for batch, of_batch in zip(self.batches, kept, strict=True)
        ]

    def spread(self, verdicts: list[list[Verdict]]) -> list[list[Verdict]]:
        """Return a verdict for each page, given those of the pages that were moved."""
        if not self._kept:
            return verdicts
        each = [iter(of_batch) for of_batch in verdicts]
        return [
            [next(moved) if is_kept else Verdict.NOT_ADMITTED for is_kept in of_batch]
            for moved, of_batch in zip(each, self._kept, strict=True)
        ]

    def all(self, verdict: Verdict) -> list[list[Verdict]]:
        """Return the same verdict for each page. A malformed job has none."""
        try:
            return [[verdict] * len(batch.hashes) for batch in self.batches]
        except Exception:  # noqa: BLE001 - no error reaches the engine's thread
            return []

    def nbytes(self) -> int:
        """Return the payload bytes of all pages. A malformed job has none."""
        try:
            return sum(len(batch.hashes) * batch.space.page_nbytes for batch in self.batches)
        except Exception:  # noqa: BLE001 - as above
            return 0

    def moved_nbytes(self, verdicts: list[list[Verdict]]) -> int:
        """Return the payload bytes of the pages that are OK."""
        counts = [of_batch.count(Verdict.OK) for of_batch in verdicts]
        if not any(counts):  # the job may be malformed
            return 0
        sizes = [batch.space.page_nbytes for batch in self.batches]
        return sum(map(operator.mul, counts, sizes))
