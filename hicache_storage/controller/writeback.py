"""L2 → L3: a bounded queue of pages to write, and the thread that writes them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from hicache_storage.controller.settings import DropPolicy
from hicache_storage.controller.transfer_batch import TransferBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.settings import ControllerSettings
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

# A thread that has nothing left to do needs a moment, also where all the time went into writing.
_TO_END_S = 0.1


class Writeback:
    """Writes pages in the order in which they came, many pools of many pages in one call.

    A page's required pools go first, its optional ones with the next call: what fails in between leaves
    a target without its draft, never the reverse. Pages in the queue are pinned. What does not fit is
    dropped and counted: a slow store costs hits, it never holds up a request.
    """

    def __init__(
        self,
        store: PageStore,
        cache: HostCache,
        settings: ControllerSettings,
        counters: Counters,
        *,
        epoch: int,
        used: Callable[[], AbstractContextManager[object]],
        track: Callable[[Future[None]], None],
    ) -> None:
        """Take the store, the pages' cache, and what counts the calls of the store that still run."""
        self._store = store
        self._cache = cache
        self._settings = settings
        self._limit = settings.write_queue_pages or cache.pool_set.capacity_pages
        self._counters = counters
        self._epoch = epoch
        self._used = used
        self._track = track
        self._queue: deque[Entry] = deque()
        self._begun: list[Entry] = []
        """Pages whose required pools are written, and others are due."""
        self._changed = threading.Condition()
        self._writing = False
        self._closing = False
        self._lost = 0
        """Pages that were queued and are not in the store, or not in all pools."""
        self._thread = threading.Thread(target=self._work, name="hicache-writeback", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def consider(self, entries: Sequence[Entry]) -> None:
        """Queue those of `entries` that the write policy wants in L3 by now."""
        uses = self._settings.write_policy.uses
        if uses is not None:
            self.offer(self._cache.claim_for_writing(entries, uses))

    def offer(self, entries: Sequence[Entry]) -> None:
        """Queue `entries`, each pinned and marked for it; drop what does not fit."""
        if not entries:
            return
        with self._changed:
            self._queue.extend(entries)
            excess = len(self._queue) - (0 if self._closing else self._limit)
            oldest = self._settings.drop_policy is DropPolicy.OLDEST
            end = self._queue.popleft if oldest else self._queue.pop
            dropped = [end() for _ in range(max(0, excess))]
            self._changed.notify_all()
        self._drop(dropped)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until the queue is empty; True where no page was lost meanwhile.

        A page is lost that was dropped, or that the store did not take in every pool.
        """
        with self._changed:
            lost_before = self._lost
            return self._changed.wait_for(self._is_idle, timeout_s) and self._lost == lost_before

    def close(self, deadline: Deadline, *, drain: bool, owed: Sequence[Entry] = ()) -> bool:
        """End the thread, with `drain` once the queue is empty; what is still queued is dropped.

        `owed` pages, pinned and marked for it, are queued before. False where `drain` lost a page. What
        is offered from then on is dropped.
        """
        with self._changed:
            # In one hold of the lock: a page that is queued or lost in between would go unseen.
            self._queue.extend(owed)
            self._changed.notify_all()
            drained = not drain or self.drain(deadline.remaining_s() if self._thread.ident else 0)
            self._closing = True
            dropped = [*self._begun, *self._queue]
            self._begun = []
            self._queue.clear()
            self._changed.notify_all()
        self._drop(dropped)
        if self._thread.ident is not None:
            self._thread.join(max(_TO_END_S, deadline.remaining_s()))
        return drained

    def _is_idle(self) -> bool:
        return not (self._queue or self._begun or self._writing)

    def _drop(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._counters.add("dropped_pages", len(entries))
            self._lose(len(entries))
            self._cache.give_up(entries, self._epoch)

    def _lose(self, pages: int) -> None:
        with self._changed:
            self._lost += pages

    def _work(self) -> None:
        while batch := self._next_batch():
            begun: list[Entry] = []
            try:
                begun = self._write(batch)
            except Exception:
                logger.exception("%d pages could not be written", len(batch))
                self._counters.add("internal_errors")
                self._lose(len(batch))
                self._cache.give_up(batch, self._epoch)
            with self._changed:
                self._writing = False
                closing = self._closing
                self._begun = [] if closing else begun
                self._changed.notify_all()
            if closing:
                self._drop(begun)

    def _next_batch(self) -> list[Entry]:
        """The pages that were begun, and the oldest of the queue; none once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._begun or self._closing)
            size = min(self._settings.batch_pages, len(self._queue))
            batch = [*self._begun, *(self._queue.popleft() for _ in range(size))]
            self._begun = []
            self._writing = bool(batch)
            return batch

    def _write(self, batch: list[Entry]) -> list[Entry]:
        """Write what is due of each page; those of which more is due now."""
        cache = self._cache
        traffic = TransferBatch(cache.pool_set)
        wanted = cache.due(batch)
        for entry, bits in zip(batch, wanted, strict=True):
            traffic.add(entry.page_hash, entry.slots, bits)
        with self._used():
            outcome = self._store.save(traffic.transfers())
            self._track(outcome.settled)
        taken = traffic.ok(outcome)
        cache.stored(batch, taken, self._epoch)
        due = cache.due(batch)
        begun: list[Entry] = []
        ended: list[Entry] = []
        for entry, bits, ok, more in zip(batch, wanted, taken, due, strict=True):
            (begun if more and bits == ok else ended).append(entry)
        whole = sum(not more for more in due)
        self._counters.add("written_pages", whole)
        self._counters.add("unwritten_pages", len(ended) - whole)
        self._lose(len(ended) - whole)
        cache.written(ended, self._epoch)
        # A call that overran may still read these slots: they stay pinned until it is over.
        outcome.settled.add_done_callback(lambda _: cache.unpin(ended))
        return begun
