"""L3 → L2: the pages of one request, fetched behind its back, used as far as they got."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_storage.controller.lease import Lease
from hicache_storage.controller.policies import WritePolicy
from hicache_storage.transfer import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.host_cache import Entry, HostCache
    from hicache_storage.controller.policies import ControllerSettings
    from hicache_storage.controller.writeback import Writeback
    from hicache_storage.counters import Counters
    from hicache_storage.page_store import PageStore
    from hicache_storage.transfer import Outcome

# Idle pages of a write-back cache make room once they are written: worth waiting for, but not for long.
_WRITE_BACK_TIMEOUT_S = 1.0


class Prefetch:
    """One request's prefetch: ended by `result`, or by `cancel` where it is not wanted any more."""

    def __init__(
        self,
        request_id: str,
        hashes: Sequence[str],
        *,
        cache: HostCache,
        counters: Counters,
        patience_s: float | None,
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self._cache = cache
        self._counters = counters
        self._patience_s = patience_s
        self._entries: list[Entry] = []
        self._loaded: list[int] = []
        self._ended = False
        self._lock = threading.Lock()
        self._complete = threading.Event()

    @property
    def arrived_pages(self) -> int:
        """The length of the prefix that is in L2 by now."""
        return len(self._entries)

    @property
    def complete(self) -> bool:
        """Whether nothing more will arrive."""
        return self._complete.is_set()

    def result(self) -> Lease:
        """Wait as the policy says, end the prefetch, and take what has arrived, pinned.

        Raises:
            RuntimeError: It was taken or cancelled before.
        """
        self._complete.wait(self._patience_s)
        with self._lock:
            if self._ended:
                raise RuntimeError(f"prefetch of request {self.request_id!r} was ended before")
            self._ended = True
        lease = Lease(self._cache, self._entries, self._loaded)
        self._counters.add("requests")
        self._counters.add("l2_hit_pages", lease.l2_pages)
        self._counters.add("l3_hit_pages", lease.l3_pages)
        self._counters.add("missed_pages", len(self.hashes) - lease.pages)
        return lease

    def cancel(self) -> None:
        """End the prefetch and let everything go. Idempotent; does nothing after `result`."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._counters.add("cancelled_requests")
        self._counters.add("loaded_unused_pages", len(self._loaded))
        self._cache.unpin(self._entries)

    # --- the prefetching thread's side ---------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Nobody waits for pages any more."""
        return self._ended

    def add(self, entries: list[Entry], *, loaded: bool) -> bool:
        """Lengthen the prefix by pinned `entries`; False, and nothing is added, where it has ended."""
        with self._lock:
            if self._ended:
                return False
            if loaded:
                start = len(self._entries)
                self._loaded += range(start, start + len(entries))
            self._entries += entries
            return True

    def finish(self) -> None:
        """Nothing more will arrive."""
        self._complete.set()


class Prefetcher:
    """What a prefetching thread does for one request after another."""

    def __init__(
        self,
        store: PageStore,
        cache: HostCache,
        writeback: Writeback,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        self._store = store
        self._cache = cache
        self._writeback = writeback
        self._settings = settings
        self._counters = counters
        self._pools = [stored for pool in cache.pools for stored in pool.stored]
        writes_back = settings.write_policy is WritePolicy.WRITE_BACK
        self._room_timeout_s = _WRITE_BACK_TIMEOUT_S if writes_back else 0.0

    def extend_from_l2(self, prefetch: Prefetch) -> None:
        """Add the pages that L2 has next; being used, some may now be worth writing."""
        entries = self._cache.acquire(prefetch.hashes[prefetch.arrived_pages :])
        self._writeback.consider(entries)
        if not prefetch.add(entries, loaded=False):
            self._cache.unpin(entries)

    def run(self, prefetch: Prefetch) -> None:
        """Fill gap after gap, until the prefix is whole, or L3 has no more of it, or nobody waits."""
        try:
            while not prefetch.ended and self._fill_gap(prefetch):
                self.extend_from_l2(prefetch)
        finally:
            prefetch.finish()

    def _fill_gap(self, prefetch: Prefetch) -> bool:
        """Load the run of pages that L2 lacks next; False where the prefix ends here."""
        rest = prefetch.hashes[prefetch.arrived_pages :]
        gap = rest[: self._cache.missing_run(rest)]
        if not gap:
            return bool(rest)
        found = self._store.match(gap, self._pools).pages
        if found * self._pools[0].space.page_tokens < self._settings.prefetch_threshold_tokens:
            self._counters.add("below_threshold_pages", found)
            return False
        step = self._settings.batch_pages
        parts = (gap[start : min(start + step, found)] for start in range(0, found, step))
        return all(self._load(prefetch, part) for part in parts) and found == len(gap)

    def _load(self, prefetch: Prefetch, hashes: Sequence[str]) -> bool:
        """Load one batch; whether all of it arrived in time to be used."""
        if prefetch.ended:
            return False
        groups = self._cache.allocate(len(hashes), timeout_s=self._room_timeout_s)
        self._counters.add("no_host_slot_pages", len(hashes) - len(groups))
        if not groups:
            return False
        wanted = hashes[: len(groups)]
        outcome = self._store.load(self._cache.transfers(wanted, groups))
        arrived = outcome.arrived()
        unusable = groups[arrived:]
        # A call that overran may still write into these slots: nobody gets them before it is over.
        outcome.settled.add_done_callback(lambda _: self._cache.free(unusable))
        entries = [
            self._cache.insert(page_hash, slots, stored=True)
            for page_hash, slots in zip(wanted[:arrived], groups[:arrived], strict=True)
        ]
        used = prefetch.add(entries, loaded=True)
        if not used:  # too late for this request; L2 keeps them for the next
            self._cache.unpin(entries)
        self._count(outcome, arrived, used=used)
        return used and arrived == len(hashes)

    def _count(self, outcome: Outcome, arrived: int, *, used: bool) -> None:
        landed = max(verdicts.count(Verdict.OK) for verdicts in outcome.verdicts)
        self._counters.add("loaded_pages", landed)
        self._counters.add("loaded_unused_pages", landed - (arrived if used else 0))
