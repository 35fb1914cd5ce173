"""L2 → L3: a bounded queue of pages to write, and the thread that writes them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.host_cache import Entry, HostCache
    from hicache_storage.controller.policies import ControllerSettings
    from hicache_storage.counters import Counters
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)


class Writeback:
    """Writes pages in the order in which they came, all pools of a page together.

    Pages in the queue are pinned. What does not fit is dropped and counted: a slow store costs hits, it
    never holds up a request.
    """

    def __init__(
        self, store: PageStore, cache: HostCache, settings: ControllerSettings, counters: Counters
    ) -> None:
        self._store = store
        self._cache = cache
        self._uses = settings.write_policy.uses
        self._batch_pages = settings.batch_pages
        slots = min(pool.host.slots for pool in cache.pools)
        self._limit = settings.write_queue_pages or slots
        self._counters = counters
        self._queue: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="hicache-writeback", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def consider(self, entries: Sequence[Entry]) -> None:
        """Queue those of `entries` that the write policy wants in L3 by now."""
        if self._uses is not None:
            self.offer(self._cache.claim_for_writing(entries, self._uses))

    def offer(self, entries: Sequence[Entry]) -> None:
        """Queue `entries`, each pinned and marked for it; drop those that do not fit."""
        with self._changed:
            room = 0 if self._closing else max(0, self._limit - len(self._queue))
            self._queue.extend(entries[:room])
            self._changed.notify_all()
        dropped = entries[room:]
        if dropped:
            self._counters.add("dropped_pages", len(dropped))
            self._cache.give_up(dropped)

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until everything is written or failed; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End the thread; what is still queued is dropped. False where a write still runs."""
        with self._changed:
            self._closing = True
            dropped = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._counters.add("dropped_pages", len(dropped))
        self._cache.give_up(dropped)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._write(batch)
            except Exception:
                logger.exception("%d pages could not be written", len(batch))
                self._counters.add("internal_errors")
                self._cache.give_up(batch)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _next_batch(self) -> list[Entry]:
        """The oldest pages of the queue; none once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            size = min(self._batch_pages, len(self._queue))
            self._writing = bool(size)
            return [self._queue.popleft() for _ in range(size)]

    def _write(self, batch: list[Entry]) -> None:
        hashes = [entry.page_hash for entry in batch]
        outcome = self._store.save(self._cache.transfers(hashes, [entry.slots for entry in batch]))
        stored = outcome.whole()
        self._counters.add("written_pages", stored.count(True))
        self._counters.add("unwritten_pages", stored.count(False))
        self._cache.written(batch, stored)
        # A call that overran may still read these slots: they stay pinned until it is over.
        outcome.settled.add_done_callback(lambda _: self._cache.unpin(batch))
