"""Write pages from L2 to L3: a bounded queue, and the thread that empties it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from itertools import compress
from typing import TYPE_CHECKING

from hicache_storage.controller.pools import pool_numbers
from hicache_storage.controller.transfer_batch import TransferBatch
from hicache_storage.controller_settings import MIN_END_WAIT_S, DropPolicy
from hicache_storage.durations import longest_wait_s
from hicache_storage.request_log import Operation, Reason
from hicache_storage.scalars import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller_settings import ControllerSettings
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.admission import Admission
    from hicache_storage.page_store.results import Verdict
    from hicache_storage.request_log import ExplainLog

logger: logging.Logger = logging.getLogger(__name__)


class Writeback:
    """The queue of pages to write from L2 to L3, in order. One call writes many pages of all pools.

    The required pools of a page are written first, and the optional ones in the next call. If that call
    fails, L3 has a target without its draft, never the reverse. Queued pages are pinned. Pages beyond
    the limit are dropped and counted, so a slow store costs hits but never delays a request.
    """

    def __init__(
        self,
        store: PageStore,
        cache: HostCache,
        settings: ControllerSettings,
        counters: Counters,
        *,
        epoch: int,
        in_use: Callable[[], AbstractContextManager[object]],
        admission: Admission | None = None,
        explain_log: ExplainLog | None = None,
    ) -> None:
        """Use the store and the cache. `in_use` counts running calls of the store."""
        self._store = store
        self._cache = cache
        self._settings = settings
        self._limit = settings.write_queue_pages or cache.pool_set.capacity_pages
        self._counters = counters
        self._epoch = epoch
        self._in_use = in_use
        self._admission = admission
        self._explain_log = explain_log
        pool_set = cache.pool_set
        self._page_nbytes = sum(
            pool_set.pools[number].space.page_nbytes for number in pool_numbers(pool_set.written)
        )
        self._queue: deque[Entry] = deque()
        self._partly_written: list[Entry] = []
        """Pages whose required pools are written and whose optional pools are not."""
        self._changed = threading.Condition()
        self._writing = False
        self._closing = False
        self._lost_pages = 0
        """How many queued pages are not in the store, or not in all pools."""
        self._thread = threading.Thread(target=self._run, name="hicache-writeback", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, entries: Sequence[Entry]) -> None:
        """Queue the entries that the write policy selects."""
        uses = self._settings.write_policy.uses
        if uses is not None:
            self.enqueue(self._cache.claim_for_writing(entries, uses))

    def enqueue(self, entries: Sequence[Entry]) -> None:
        """Queue `entries`, each pinned and marked as queued. Drop the pages beyond the limit.

        Pages that are not admitted are not queued, but they are offered again at their next use.
        """
        entries = self._admitted(entries)
        if not entries:
            return
        with self._changed:
            self._queue.extend(entries)
            excess = len(self._queue) - (0 if self._closing else self._limit)
            oldest = self._settings.drop_policy is DropPolicy.OLDEST
            pop = self._queue.popleft if oldest else self._queue.pop
            dropped = [pop() for _ in range(max(0, excess))]
            self._changed.notify_all()
        self._drop(dropped)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until the queue is empty. Return True if no page was lost meanwhile.

        A page is lost if it is dropped, or if the store does not take it in every pool.
        """
        with self._changed:
            lost_before = self._lost_pages
            is_idle = self._changed.wait_for(self._is_idle, longest_wait_s(timeout_s))
            return is_idle and self._lost_pages == lost_before

    def close(self, deadline: Deadline, *, drain: bool, unsaved: Sequence[Entry] = ()) -> bool:
        """End the thread. With `drain`, first write the queued pages.

        The `unsaved` pages, which are pinned and marked as queued, are added to the queue at the start.
        Pages that are still queued at the end, or are offered later, are dropped. Return False if
        `drain` was set and a page was lost.
        """
        unsaved = self._admitted(unsaved)
        with self._changed:
            # The lock is held throughout, so that each page that is queued or lost is counted.
            self._queue.extend(unsaved)
            self._changed.notify_all()
            drained = not drain or self.drain(deadline.remaining_s() if self._thread.ident else 0)
            self._closing = True
            dropped = [*self._partly_written, *self._queue]
            self._partly_written = []
            self._queue.clear()
            self._changed.notify_all()
        self._drop(dropped)
        if self._thread.ident is not None:
            self._thread.join(max(MIN_END_WAIT_S, deadline.remaining_s()))
        return drained

    def _admitted(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the pages that are admitted, and abandon the others."""
        if self._admission is None or not entries:
            return entries
        admitted = self._admission.admit(
            [entry.page_hash for entry in entries],
            self._page_nbytes,
            used=[entry.uses > 1 for entry in entries],
        )
        refused = [entry for entry, ok in zip(entries, admitted, strict=True) if not ok]
        if refused:
            self._cache.abandon_writes(refused, self._epoch)
            self._explain_unwritten(refused, Reason.NOT_ADMITTED)
        return list(compress(entries, admitted))

    def _is_idle(self) -> bool:
        return not (self._queue or self._partly_written or self._writing)

    def _drop(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._counters.add("dropped_pages", len(entries))
            self._explain_unwritten(entries, Reason.REFUSED)
            self._count_lost(len(entries))
            self._cache.abandon_writes(entries, self._epoch)

    def _count_lost(self, pages: int) -> None:
        with self._changed:
            self._lost_pages += pages

    def _run(self) -> None:
        while batch := self._next_batch():
            partly_written: list[Entry] = []
            try:
                partly_written = self._write(batch)
            except Exception:
                logger.exception("%s could not be written", counted(len(batch), "page"))
                self._counters.add("internal_errors")
                self._count_lost(len(batch))
                self._cache.abandon_writes(batch, self._epoch)
            with self._changed:
                self._writing = False
                closing = self._closing
                self._partly_written = [] if closing else partly_written
                self._changed.notify_all()
            if closing:
                self._drop(partly_written)

    def _next_batch(self) -> list[Entry]:
        """Return the partly written and the oldest queued pages, or an empty list once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._partly_written or self._closing)
            size = min(self._settings.batch_pages, len(self._queue))
            batch = [*self._partly_written, *(self._queue.popleft() for _ in range(size))]
            self._partly_written = []
            self._writing = bool(batch)
            return batch

    def _write(self, batch: list[Entry]) -> list[Entry]:
        """Write the next pools of each page. Return the pages that have more pools to write."""
        cache = self._cache
        transfers = TransferBatch(cache.pool_set)
        wanted = cache.pools_to_write(batch)
        for entry, bits in zip(batch, wanted, strict=True):
            transfers.add(entry.page_hash, entry.slots, bits)
        began_s = time.monotonic()
        activity = self._store.begin_activity("writeback", {"pages": len(batch)})
        with self._in_use(), activity.resume():
            outcome = self._store.save(transfers.transfers())
        taken = transfers.succeeded(outcome)
        if self._explain_log is not None:
            self._explain_write(batch, transfers.failures(outcome), time.monotonic() - began_s)
        cache.mark_stored(batch, taken, self._epoch)
        left = cache.pools_to_write(batch)
        partly_written: list[Entry] = []
        ended: list[Entry] = []
        for entry, bits, ok, more in zip(batch, wanted, taken, left, strict=True):
            (partly_written if more and bits == ok else ended).append(entry)
        written = sum(not more for more in left)
        activity.end({"pages.written": written, "pages.partly_written": len(partly_written)})
        self._counters.add("written_pages", written)
        self._counters.add("unwritten_pages", len(ended) - written)
        self._count_lost(len(ended) - written)
        cache.end_writes(ended, self._epoch)
        cache.unpin(ended)
        return partly_written

    # --- the log -------------------------------------------------------------------------------------

    def _explain_unwritten(self, entries: Sequence[Entry], reason: Reason) -> None:
        """Log pages that were not offered to the store."""
        if self._explain_log is not None:
            self._explain_log.add(
                Operation.STORE,
                first_hash=entries[0].page_hash,
                asked_pages=len(entries),
                hit_pages=0,
                page=0,
                page_hash=entries[0].page_hash,
                reason=reason,
                reasons={reason: len(entries)},
            )

    def _explain_write(
        self, batch: list[Entry], failures: list[tuple[int, int, Verdict]], elapsed_s: float
    ) -> None:
        """Log a write if the store did not take all pages. `failures` has (page, pool, verdict)."""
        if self._explain_log is None or not failures:
            return
        reason_of = {page: Reason.of(verdict) for page, _, verdict in reversed(failures)}
        page, number, _ = min(failures, key=lambda failure: failure[0])
        self._explain_log.add(
            Operation.STORE,
            first_hash=batch[0].page_hash,
            asked_pages=len(batch),
            hit_pages=len(batch) - len(reason_of),
            page=page,
            page_hash=batch[page].page_hash,
            pool=self._cache.pools[number].space.pool,
            reason=reason_of[page],
            reasons=Counter(reason_of.values()),
            elapsed_s=elapsed_s,
        )
