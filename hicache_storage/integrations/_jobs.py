"""Run an engine's lookups, loads and stores on a page store. Each job has a deadline.

The engine's thread submits jobs and fetches their results. That thread never waits, and gets no errors.
Daemon threads do everything else:

    hicache-lookup-N    two; each answers all waiting lookups, with one call for each key space
    hicache-load-N      eleven; each moves one piece of a load at a time, at most three of large loads
    hicache-store-N     two; each moves one piece of a store at a time, while no load waits for a thread
    hicache-open-N      two; they open key spaces, and try again after a failure
    hicache-admission   one, if pages are written at their second use; it keeps the sketch in the store

The page store has more threads, which call the storage itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.integrations._job_results import (
    JobKind,
    JobResult,
    LookupResult,
    ResultQueue,
)
from hicache_storage.integrations._lookup_queue import LookupQueue
from hicache_storage.integrations._spaces import SpaceOpener
from hicache_storage.integrations._switch_interval import SwitchIntervalSettings
from hicache_storage.integrations._transfer_queue import TransferLimits, TransferQueue
from hicache_storage.integrations._write_admission import WriteAdmission
from hicache_storage.page_store.admission import AdmissionSettings
from hicache_storage.settings import ByteSize, Field, PositiveSeconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore, Transfer

__all__ = ["JobKind", "JobResult", "JobRunner", "JobSettings", "LookupResult"]

# Eight threads are left for small loads, even if a slow store cannot move large loads in time.
_LOADS = {"large": 3, "small": 4, "threads": 11}
_STORES = {"large": 2, "small": 2, "threads": 2}
_MIN_IDLE_WAIT_S = 1.0


class JobSettings(SwitchIntervalSettings):
    """The settings of a job runner. Each engine's adapter has these fields among its own settings."""

    lookup_timeout_s: PositiveSeconds = 0.5
    """The deadline of a lookup, from its submission. A page without an answer by then is missing."""
    load_timeout_s: PositiveSeconds = 2.0
    """The deadline of a load, from its submission. Pages that have not arrived by then are TIMEOUT."""
    store_timeout_s: PositiveSeconds = 10.0
    """The deadline of a store, from its submission."""
    queued_nbytes: ByteSize = Field(default=256 << 20, gt=0)
    """The limit for the payload bytes of waiting stores. A store that exceeds it is dropped and counted,
    unless no other store waits. The page store's private memory has the same limit in each direction."""
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
        """Start the threads.

        Args:
            store: The page store. The runner opens the key spaces that jobs store pages in.
            settings: The runner's deadlines and memory limits.
            on_finished: A function that any thread calls once for each result. If a job ends at once,
                the thread that calls `submit_*` calls it.
            owner: A key space of the engine's pages. The store keeps the sketch of `admission` under it.
                None: the key space of the first store, for which the sketch is not restored yet.
        """
        settings.shorten_switch_interval()
        self._store = store
        self._spaces = SpaceOpener(store)
        self._admission = WriteAdmission(store, settings.admission)
        if owner is not None:
            self._admission.start(owner)
        self._lookup_results = ResultQueue[LookupResult](JobKind.LOOKUP, on_finished)
        self._load_results = ResultQueue[JobResult](JobKind.LOAD, on_finished)
        self._store_results = ResultQueue[JobResult](JobKind.STORE, on_finished)
        self._lookups = LookupQueue(store, self._lookup_results, settings.lookup_timeout_s)
        self._loads = TransferQueue(
            self._load_results,
            store.load,
            TransferLimits(**_LOADS, timeout_s=settings.load_timeout_s),
            store.begin_activity,
        )
        self._stores = TransferQueue(
            self._store_results,
            store.save,
            TransferLimits(
                **_STORES,
                timeout_s=settings.store_timeout_s,
                queued_nbytes=settings.queued_nbytes,
            ),
            store.begin_activity,
            spaces=self._spaces,
            before=self._loads,
            admission=self._admission,
        )

    # --- the engine's thread -------------------------------------------------------------------------

    def submit_lookup(self, job_id: int, queries: Sequence[tuple[KeySpace, Sequence[str]]]) -> None:
        """Submit a lookup of which pages the store has. The call never blocks or raises."""
        self._lookups.submit(job_id, queries)

    def submit_load(self, job_id: int, batches: Sequence[Transfer]) -> None:
        """Submit a load of pages into the engine's memory. The call never blocks or raises."""
        self._loads.submit(job_id, batches)

    def submit_store(self, job_id: int, batches: Sequence[Transfer]) -> None:
        """Submit a store of pages from the engine's memory. The call never blocks or raises.

        The pages must not change until the job is reported. If the job does not fit in the queue, its
        pages are REFUSED.
        """
        self._stores.submit(job_id, batches)

    def finished_lookups(self) -> list[LookupResult]:
        """Return the results of lookups that ended since the last call."""
        return self._lookup_results.take()

    def finished_loads(self) -> list[JobResult]:
        """Return the results of loads that ended since the last call."""
        return self._load_results.take()

    def finished_stores(self) -> list[JobResult]:
        """Return the results of stores that ended since the last call."""
        return self._store_results.take()

    # --- for any thread ------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job has ended. Return False if a job is still running after `timeout_s`.

        Without a `timeout_s`, the deadlines of the jobs end the wait.
        """
        deadline = None if timeout_s is None else Deadline(timeout_s)
        results = (self._lookup_results, self._load_results, self._store_results)
        return all(each.wait_idle(deadline) for each in results)

    def stats(self) -> dict[str, int]:
        """Return the counters since the start, and the memory that is in use now.

        A counter appears with its first count: jobs of each kind (`load_jobs`), pages of loads and
        stores by verdict (`store_pages_refused`), `store_jobs_dropped`, `lookup_pages`,
        `lookup_pages_present`, `lookup_pages_unanswered`, `not_admitted_first_use`,
        `not_admitted_rate`, `space_open_failures`. The present values are
        `queued_store_nbytes`, `private_nbytes`, `private_nbytes_used`, `open_spaces`.
        """
        private_nbytes, private_nbytes_used = self._store.private_nbytes()
        return {
            **self._lookups.counters.snapshot(),
            **self._loads.counters.snapshot(),
            **self._stores.counters.snapshot(),
            **self._admission.stats(),
            "queued_store_nbytes": self._stores.waiting_nbytes,
            "private_nbytes": private_nbytes,
            "private_nbytes_used": private_nbytes_used,
            "open_spaces": self._spaces.count,
            "space_open_failures": self._spaces.failed,
        }

    def close(self, timeout_s: float = 15.0) -> bool:
        """End all jobs: give up waiting lookups and loads, and run stores until `timeout_s`. Idempotent.

        Return True if nothing touches the engine's memory any more, now or later. Jobs that are
        submitted later end at once, without calling the store.
        """
        deadline = Deadline(timeout_s)
        self._lookups.stop()
        self._loads.stop(gives_up=True)
        self._stores.stop(gives_up=False)
        self.drain(deadline.remaining_s())
        self._stores.stop(gives_up=True)
        self._admission.close(deadline.remaining_s())
        ended = self.drain(max(_MIN_IDLE_WAIT_S, deadline.remaining_s()))
        self._spaces.close()
        return ended
