"""The state of one prefetch: pinned pages, time limits, and why pages are missing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.ranks import Topic
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.page_store.observer import NO_ACTIVITY, Activity
from hicache_storage.request_log.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.consensus import Consensus
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller.explain import Explanations
    from hicache_storage.controller.pools import PoolBits
    from hicache_storage.controller.prefetch_quota import PrefetchQuota
    from hicache_storage.controller_settings import ControllerSettings
    from hicache_storage.page_store.results import Verdict
    from hicache_storage.request_log import ExplainLog

# The timeout of a call that is made when the request's deadline has just passed.
_LEAST_TIMEOUT_S = 0.001

# A tracing span keeps at most this many characters of a request id, because clients choose ids.
_MAX_ID_CHARACTERS = 128

_GONE = frozenset({Reason.VANISHED, Reason.CORRUPT, Reason.WRONG_KEY, Reason.WRONG_SIZE})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchContext:
    """The objects and functions that all prefetches of one controller share."""

    cache: HostCache
    settings: ControllerSettings
    counters: Counters
    consensus: Consensus
    explanations: Explanations
    quota: PrefetchQuota
    attached: Callable[[], AttachedStore | None]
    """A function that returns the store that is attached now."""
    offer: Callable[[Sequence[Entry]], None]
    """A function that offers pages to the write policy."""
    hit_pools: PoolBits
    """The pools that a page must have to be a hit."""
    explain_log: ExplainLog | None = None
    """Where explanations are logged."""


class PrefetchDiagnostics:
    """A record of which pages of a request are available, and why the other pages did not arrive.

    The prefetching thread writes the record. The engine's thread reads it when the request ends, perhaps
    while the prefetching thread is still working.
    """

    def __init__(self) -> None:
        self.present: list[PoolBits] = []
        """For each page, the pools that L2 has or L3 reports. Empty before the lookup."""
        self.lookup_failures: dict[int, Verdict] = {}
        """Pools that could not be looked up, and why."""
        self.failures: dict[tuple[int, int], Reason] = {}
        """For each (page, pool) that did not arrive, the reason."""
        self.stopped: Reason | None = None
        """Why loading stopped."""
        self.rank: int | None = None
        """The rank with the shortest prefix, if another rank's prefix is shorter than this rank's."""

    def drop_vanished(self) -> bool:
        """Remove from `present` the pages that storage turned out not to have.

        Return False if there are no such pages, or if the store also failed in other ways.
        """
        if self.stopped or not _GONE.issuperset(self.failures.values()):
            return False
        gone = [(page, pool) for page, pool in self.failures if self.present[page] >> pool & 1]
        for page, pool in gone:
            self.present[page] &= ~(1 << pool)
        return bool(gone)

    def reason(self, page: int, pool: int, *, default: Reason) -> Reason:
        """Return why a page is missing from a pool, or `default` if no reason was recorded."""
        failure = self.failures.get((page, pool))
        if failure is not None:
            return failure
        if self.present and not self.present[page] >> pool & 1:
            verdict = self.lookup_failures.get(pool)
            return Reason.ABSENT if verdict is None else Reason.of(verdict)
        return self.stopped or default


class PrefetchJob:
    """One prefetch that the prefetching thread works on. Thread-safe.

    From the start, the job pins all pages of the prefix that are in L2, even after a gap. Pages that
    arrive are added until `end`.
    """

    def __init__(
        self,
        context: PrefetchContext,
        request_id: str,
        hashes: Sequence[str],
        deadline_s: float | None,
    ) -> None:
        self.request_id = request_id
        self.hashes = hashes
        self.diagnostics: PrefetchDiagnostics = PrefetchDiagnostics()
        self.began_s: float = time.monotonic()
        self.loaded: set[int] = set()
        """The pages that were loaded in time, in any pool."""
        self.activity: Activity = _begin_activity(context, request_id, len(hashes))
        self._cache = context.cache
        self._quota = context.quota
        self._deadline = None if deadline_s is None else Deadline(deadline_s)
        page_tokens = self._cache.pools[0].space.page_tokens
        self._max_wait_s = context.settings.max_wait_s(len(hashes), page_tokens)
        self._entries = self._cache.pin(hashes)
        self._quota_pages = 0
        self._ended = False
        self._lock = threading.Lock()
        self._complete = threading.Event()

    @cached_property
    def topic(self) -> Topic:
        """The topic under which ranks agree on this request."""
        return Topic.of_request(self.request_id, self.hashes)

    # --- time ----------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """True once no more pages will arrive."""
        return self._complete.is_set()

    def finish(self) -> None:
        self._complete.set()

    def wait(self) -> None:
        """Wait until the job is complete, or until the time of the policy or of the request is up."""
        limits_s = [each for each in (self._max_wait_s, self._remaining_s()) if each is not None]
        self._complete.wait(min(*limits_s, MAX_DURATION_S) if limits_s else None)

    def bounded_s(self, timeout_s: float) -> float:
        """Return `timeout_s`, or the time until the request's deadline if that is shorter."""
        left_s = self._remaining_s()
        return timeout_s if left_s is None else min(timeout_s, max(left_s, _LEAST_TIMEOUT_S))

    def time_up_reason(self) -> Reason:
        """Return which limit ended the wait: the request's deadline or the prefetch policy."""
        left_s = self._remaining_s()
        return Reason.DEADLINE if left_s == 0 else Reason.PATIENCE

    def stop_reason(self) -> Reason | None:
        """Return why the request does not wait for pages any more, or None while it does."""
        if self._ended:
            return Reason.PATIENCE
        reason = self.time_up_reason()
        return reason if reason is Reason.DEADLINE else None

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline.remaining_s()

    # --- pages ---------------------------------------------------------------------------------------

    def entry(self, page: int) -> Entry | None:
        """Return the entry of a page that this job has pinned, or None if it has not pinned the page."""
        return self._entries[page]

    def filled(self) -> list[PoolBits]:
        """Return, for each page, the pools that L2 has."""
        return [0 if entry is None else entry.filled for entry in self._entries]

    def pin_new_pages(self) -> list[PoolBits]:
        """Pin pages that have come into L2 since the job pinned its pages. Return the new `filled`."""
        missing = [page for page, entry in enumerate(self._entries) if entry is None]
        found = self._cache.pin(self.hashes[page] for page in missing)
        late = [
            entry
            for page, entry in zip(missing, found, strict=True)
            if entry is not None and not self._set_entry(page, entry)
        ]
        self._cache.unpin(late)
        return self.filled()

    def release_tail(self, pages: int) -> bool:
        """Unpin up to `pages` pages after the first gap, from the end. Return False if there is none."""
        released: list[Entry] = []
        with self._lock:
            gap = self._entries.index(None) if None in self._entries else len(self._entries)
            for page in range(len(self._entries) - 1, gap, -1):
                entry = self._entries[page]
                if entry is None or page in self.loaded or len(released) == pages or self._ended:
                    continue
                self._entries[page] = None
                released.insert(0, entry)
        self._cache.unpin(released)
        return bool(released)

    def acquire_quota(self, pages: int) -> bool:
        """Return True if the prefetch quota admits `pages` pages. The job's `end` releases them."""
        if not self._quota.acquire(pages):
            return False
        with self._lock:
            ended = self._ended
            if not ended:
                self._quota_pages += pages
        if ended:
            self._quota.release(pages)
        return True

    def add_loaded(self, page: int, entry: Entry) -> bool:
        """Add a page that was loaded in some pool. After the end, return False and do not add it.

        If the job has not pinned the page before, it takes over the caller's pin.
        """
        with self._lock:
            if not self._ended:
                self._entries[page] = entry
                self.loaded.add(page)
            return not self._ended

    def _set_entry(self, page: int, entry: Entry) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._entries[page] = entry
            return True

    # --- the end -------------------------------------------------------------------------------------

    def end(self) -> bool:
        """End the job, so that no more pages are added. Return False if the job had already ended."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            pages, self._quota_pages = self._quota_pages, 0
        self._quota.release(pages)
        return True

    def take_prefix(self, pages: int) -> list[Entry]:
        """Return the pinned entries of the first `pages` pages, and unpin the others."""
        self._cache.unpin([entry for entry in self._entries[pages:] if entry is not None])
        return [entry for entry in self._entries[:pages] if entry is not None]


def _begin_activity(context: PrefetchContext, request_id: str, pages: int) -> Activity:
    attached = context.attached()
    if attached is None:
        return NO_ACTIVITY
    return attached.store.begin_activity(
        "prefetch", {"request": request_id[:_MAX_ID_CHARACTERS], "pages": pages}
    )
