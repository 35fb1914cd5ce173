"""The threads that bring the requests' prefixes from L3 to L2, one request after another."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from hicache_storage.controller.availability import survey
from hicache_storage.controller.explain import Reason
from hicache_storage.controller.loader import Loading
from hicache_storage.controller.ranks import Channel
from hicache_storage.page_store.lookup import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.context import Context
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.controller.prefetch import Prefetch

logger = logging.getLogger(__name__)


class Prefetcher:
    """A queue of prefetches and the threads that serve it, whatever store is attached.

    With several ranks there is one thread, since the ranks agree on the requests in their order; and
    each request is agreed on, also where it was cancelled, or where this rank has no store.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: queue.SimpleQueue[Prefetch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-prefetch-{number}", daemon=True)
            for number in range(context.settings.prefetch_threads)
        ]

    def start(self) -> None:
        """Begin to serve."""
        for thread in self._threads:
            thread.start()

    def submit(self, prefetch: Prefetch) -> None:
        """Serve it, or finish it at once where there is nothing to do."""
        if self._context.agreement.alone:
            if self._context.tier() is None:
                prefetch.findings.stopped = Reason.NO_STORE
                prefetch.finish()
                return
            pool_set = self._context.cache.pool_set
            if pool_set.usable(prefetch.filled(), pool_set.everything)[-1]:
                prefetch.finish()
                return
        self._waiting.put(prefetch)

    def stop(self) -> None:
        """The threads end with what waits by now."""
        for _ in self._threads:
            self._waiting.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether they have ended; those who still wait are let go on, with what L2 has."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self.finish_waiting()
        return not any(thread.is_alive() for thread in self._threads)

    def finish_waiting(self) -> None:
        """Nobody will serve these any more."""
        ends = 0
        while True:
            try:
                prefetch = self._waiting.get_nowait()
            except queue.Empty:
                break
            if prefetch is None:
                ends += 1  # a thread's, which may still be busy
            else:
                prefetch.findings.stopped = Reason.CLOSED
                prefetch.finish()
        for _ in range(ends):
            self._waiting.put(None)

    def _work(self) -> None:
        while (prefetch := self._waiting.get()) is not None:
            try:
                self._serve(prefetch)
            except Exception:
                logger.exception("the prefetch of %s failed", prefetch.topic.told)
                self._blame(prefetch)
            finally:
                prefetch.finish()

    def _serve(self, prefetch: Prefetch) -> None:
        tier = self._context.tier()
        try:
            usable = self._usable(prefetch, tier)
        except Exception:
            logger.exception("%s could not be looked up", prefetch.topic.told)
            self._blame(prefetch)
            usable = [True] + [False] * len(prefetch.hashes)
        agreed, _ = self._context.agreement.agree(Channel.MATCH, prefetch.topic, usable)
        if agreed.pages < longest(usable):
            prefetch.findings.stopped = Reason.RANKS_LOST if agreed.lost else Reason.OTHER_RANK
            prefetch.findings.rank = agreed.rank
        if tier is not None:
            with tier.used() as may:
                if may:
                    self._load(prefetch, tier, agreed.pages)
                elif prefetch.findings.stopped is None:
                    prefetch.findings.stopped = Reason.DETACHED

    def _load(self, prefetch: Prefetch, tier: AttachedStore, length: int) -> None:
        """Bring a prefix of `length` pages; where some turn out to be gone, the longest without them.

        That is a shorter one, whose window may not have been fetched. Several ranks would have to agree
        on it again: they take what has arrived.
        """
        while any(wanted := self._to_load(prefetch, length)):
            Loading(self._context, tier, prefetch).run(wanted)
            if not (self._context.agreement.alone and prefetch.findings.forget_gone()):
                return
            length = longest(
                self._context.cache.pool_set.usable(prefetch.findings.present, self._context.vital)
            )

    def _usable(self, prefetch: Prefetch, tier: AttachedStore | None) -> list[bool]:
        """The prefix lengths that this rank can bring to L2, or has there."""
        pool_set, vital = self._context.cache.pool_set, self._context.vital
        if prefetch.unwanted():
            return [True] + [False] * len(prefetch.hashes)
        filled = prefetch.look_again()
        refused = Reason.NO_STORE if tier is None else self._survey(prefetch, tier, filled)
        if refused is not None:
            prefetch.findings.stopped = refused
        return pool_set.usable(prefetch.findings.present if refused is None else filled, vital)

    def _survey(self, prefetch: Prefetch, tier: AttachedStore, filled: list[Bits]) -> Reason | None:
        """Ask L3; why nothing shall be loaded of what it has, or None."""
        pool_set, vital = self._context.cache.pool_set, self._context.vital
        with tier.used() as may:
            if not may:
                return Reason.DETACHED
            timeout_s = prefetch.at_most_s(tier.store.settings.timeout_s)
            found = survey(
                tier.store, pool_set, vital, prefetch.hashes, filled, timeout_s=timeout_s
            )
        prefetch.findings.failures = found.failures
        prefetch.findings.present = found.present
        length = longest(pool_set.usable(found.present, vital))
        missing = sum(bool(bits) for bits in self._to_load(prefetch, length))
        page_tokens = self._context.cache.pools[0].space.page_tokens
        if not missing:
            return None
        if missing * page_tokens < self._context.settings.prefetch_threshold_tokens:
            self._context.counters.add("below_threshold_pages", missing)
            return Reason.BELOW_THRESHOLD
        if not prefetch.occupy(missing):
            self._context.counters.add("over_capacity_pages", missing)
            return Reason.CAPACITY_LIMIT
        return None

    def _to_load(self, prefetch: Prefetch, length: int) -> Sequence[Bits]:
        """For each page of a prefix, the pools that it needs, that L2 lacks, and that L3 has."""
        present, filled = prefetch.findings.present, prefetch.filled()
        if not present or prefetch.findings.stopped in _NOTHING_LOADED:
            return []
        needed = self._context.cache.pool_set.needed
        return [needed(page, length) & present[page] & ~filled[page] for page in range(length)]

    def _blame(self, prefetch: Prefetch) -> None:
        self._context.counters.add("internal_errors")
        prefetch.findings.stopped = Reason.INTERNAL_ERROR


_NOTHING_LOADED = (Reason.BELOW_THRESHOLD, Reason.CAPACITY_LIMIT, Reason.INTERNAL_ERROR)
