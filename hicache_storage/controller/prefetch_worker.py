"""The threads that load the prefixes of requests from L3 to L2, one request after another."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.availability import look_up
from hicache_storage.controller.loader import PrefixLoader
from hicache_storage.controller.ranks import Channel
from hicache_storage.page_store.lookup import longest
from hicache_storage.request_log.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.pools import PoolBits
    from hicache_storage.controller.prefetch_job import PrefetchContext, PrefetchJob

logger: logging.Logger = logging.getLogger(__name__)

_NOTHING_LOADED = (Reason.BELOW_THRESHOLD, Reason.CAPACITY_LIMIT, Reason.INTERNAL_ERROR)


class PrefetchWorker:
    """A queue of prefetch jobs, and the threads that serve it from the attached store.

    With several ranks there is one thread, because the ranks must agree on requests in the same order on
    each rank. They agree on each request, even if it was cancelled or if this rank has no store.
    """

    def __init__(self, context: PrefetchContext) -> None:
        self._context = context
        self._queue: queue.SimpleQueue[PrefetchJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"hicache-prefetch-{number}", daemon=True)
            for number in range(context.settings.prefetch_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, job: PrefetchJob) -> None:
        """Queue a job, or finish it at once if there is nothing to do."""
        if self._context.consensus.single_rank:
            if self._context.attached() is None:
                job.diagnostics.stopped = Reason.NO_STORE
                job.finish()
                return
            pool_set = self._context.cache.pool_set
            if pool_set.usable(job.filled(), pool_set.all_pools)[-1]:
                job.finish()
                return
        self._queue.put(job)

    def stop(self) -> None:
        """Make the threads end after the jobs that are queued now."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, then finish the queued jobs. Return False if a thread still runs."""
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(deadline.remaining_s())
        self.finish_queued()
        return not any(thread.is_alive() for thread in self._threads)

    def finish_queued(self) -> None:
        """Finish the queued jobs without loading pages, because no thread will serve these jobs."""
        ends = 0
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                ends += 1  # keep this end mark for a thread that may still be busy
            else:
                job.diagnostics.stopped = Reason.CLOSED
                job.finish()
        for _ in range(ends):
            self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                with job.activity.resume():
                    self._serve(job)
            except Exception:
                logger.exception("the prefetch of %s failed", job.topic.label)
                self._record_error(job)
            finally:
                job.finish()

    def _serve(self, job: PrefetchJob) -> None:
        attached = self._context.attached()
        try:
            usable = self._usable(job, attached)
        except Exception:
            logger.exception("%s could not be looked up", job.topic.label)
            self._record_error(job)
            usable = [True] + [False] * len(job.hashes)
        agreed, _ = self._context.consensus.agree_prefix(Channel.MATCH, job.topic, usable)
        if agreed.pages < longest(usable):
            job.diagnostics.stopped = Reason.RANKS_LOST if agreed.lost else Reason.OTHER_RANK
            job.diagnostics.rank = agreed.rank
        if attached is not None:
            with attached.in_use() as allowed:
                if allowed:
                    self._fetch_prefix(job, attached, agreed.pages)
                elif job.diagnostics.stopped is None:
                    job.diagnostics.stopped = Reason.DETACHED

    def _fetch_prefix(self, job: PrefetchJob, attached: AttachedStore, length: int) -> None:
        """Load a prefix of `length` pages. If pages have vanished, load the longest prefix without them.

        The shorter prefix may need a window that was not loaded yet. Several ranks would have to agree
        on it again, so with several ranks the request only gets the pages that have arrived.
        """
        pool_set = self._context.cache.pool_set
        while any(wanted := self._pools_to_load(job, length)):
            PrefixLoader(self._context, attached, job).load(wanted)
            if not (self._context.consensus.single_rank and job.diagnostics.drop_vanished()):
                return
            length = longest(pool_set.usable(job.diagnostics.present, self._context.hit_pools))

    def _usable(self, job: PrefetchJob, attached: AttachedStore | None) -> list[bool]:
        """Return, for each prefix length, whether this rank has that prefix in L2 or can load it."""
        if job.stop_reason():
            return [True] + [False] * len(job.hashes)
        filled = job.pin_new_pages()
        refused = Reason.NO_STORE if attached is None else self._look_up(job, attached, filled)
        if refused is not None:
            job.diagnostics.stopped = refused
        present = job.diagnostics.present if refused is None else filled
        return self._context.cache.pool_set.usable(present, self._context.hit_pools)

    def _look_up(
        self, job: PrefetchJob, attached: AttachedStore, filled: list[PoolBits]
    ) -> Reason | None:
        """Look up the prefix in L3. Return the reason to load nothing, or None."""
        context, pool_set = self._context, self._context.cache.pool_set
        with attached.in_use() as allowed:
            if not allowed:
                return Reason.DETACHED
            found = look_up(
                attached.store,
                pool_set,
                context.hit_pools,
                job.hashes,
                filled,
                timeout_s=job.bounded_s(attached.store.settings.timeout_s),
            )
        job.diagnostics.lookup_failures = found.failures
        job.diagnostics.present = found.present
        length = longest(pool_set.usable(found.present, context.hit_pools))
        missing = sum(bool(bits) for bits in self._pools_to_load(job, length))
        page_tokens = context.cache.pools[0].space.page_tokens
        if not missing:
            return None
        if missing * page_tokens < context.settings.prefetch_threshold_tokens:
            context.counters.add("below_threshold_pages", missing)
            return Reason.BELOW_THRESHOLD
        if not job.acquire_quota(missing):
            context.counters.add("over_capacity_pages", missing)
            return Reason.CAPACITY_LIMIT
        return None

    def _pools_to_load(self, job: PrefetchJob, length: int) -> Sequence[PoolBits]:
        """Return, for each page of a prefix, the pools that the page needs, L2 lacks, and L3 has."""
        present, filled = job.diagnostics.present, job.filled()
        if not present or job.diagnostics.stopped in _NOTHING_LOADED:
            return []
        needed = self._context.cache.pool_set.needed
        return [needed(page, length) & present[page] & ~filled[page] for page in range(length)]

    def _record_error(self, job: PrefetchJob) -> None:
        self._context.counters.add("internal_errors")
        job.diagnostics.stopped = Reason.INTERNAL_ERROR
