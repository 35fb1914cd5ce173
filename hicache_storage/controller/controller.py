"""Between L2 and L3: prefetch before a request runs, writeback after it has."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.admission import PrefetchQuota
from hicache_storage.controller.attached_store import AttachedStore
from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.consensus import Agreement
from hicache_storage.controller.context import Context
from hicache_storage.controller.explain import Explanations
from hicache_storage.controller.lease import Reservation
from hicache_storage.controller.prefetch import Prefetch
from hicache_storage.controller.prefetch_worker import Prefetcher
from hicache_storage.controller.ranks import SingleRank
from hicache_storage.controller.settings import ControllerSettings, PartialHits, WritePolicy
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.errors import StorageClosed
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.explain import Explanation
    from hicache_storage.controller.pools import CachePool
    from hicache_storage.controller.ranks import Ranks
    from hicache_storage.page_store import PageStore


# Threads that have nothing left to do need a moment, also where all the time went into writing.
_TO_END_S = 0.1


class CacheController:
    """The cache of one engine: L2 in host pools, L3 in a page store, and the traffic between them.

    All pools of a page (target, draft) are allocated, loaded, written and evicted together, by one code
    path over the list of pools. Thread-safe. A failing store costs hits, never a request: no method
    raises or waits because of it, beyond what the prefetch policy allows.

    The host pools, the page store and the ranks belong to the caller, and outlive the controller.
    """

    def __init__(
        self,
        store: PageStore | None,
        pools: Sequence[CachePool],
        settings: ControllerSettings | None = None,
        *,
        ranks: Ranks | None = None,
    ) -> None:
        """Open the pools' key spaces; without a store the cache is L2 alone until `attach`.

        Raises:
            ValueError: No pool, pools that do not go together, or several prefetch threads and ranks.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        self.settings = settings or ControllerSettings()
        self.ranks = ranks = ranks or SingleRank()
        if ranks.size > 1 and self.settings.prefetch_threads > 1:
            raise ValueError(
                f"{ranks.size} ranks agree on their requests one after another:"
                f" prefetch_threads must be 1, not {self.settings.prefetch_threads}"
            )
        self._writes_back = self.settings.write_policy is WritePolicy.WRITE_BACK
        self.cache = HostCache(pools, write_back=self._offer if self._writes_back else None)
        self._counters = Counters()
        self._explanations = Explanations(self.settings.explained_requests)
        pool_set = self.cache.pool_set
        shorten = self.settings.partial_hits is PartialHits.SHORTEN
        vital = pool_set.everything if shorten else pool_set.required
        self.agreement = Agreement(ranks, self._counters, pool_set, vital)
        """Where its requests, and hand-offs of them, are agreed on with the other ranks."""
        self._context = Context(
            cache=self.cache,
            settings=self.settings,
            counters=self._counters,
            agreement=self.agreement,
            explanations=self._explanations,
            occupancy=PrefetchQuota(self.settings.prefetch_capacity * pool_set.capacity_pages),
            tier=lambda: self._tier,
            consider=self._consider,
            vital=vital,
        )
        self._prefetcher = Prefetcher(self._context)
        self._tier: AttachedStore | None = None
        self._left_behind: list[AttachedStore] = []
        """Stores that were detached while a call of theirs was running."""
        self._whole = True
        """Nothing that was to be written was lost when the last store was let go of."""
        self._switching = threading.Lock()
        self._started = self._closed = False
        if store is not None:
            self._tier = self._made_tier(store)

    def start(self) -> None:
        """Register the host pools with the store and start the threads."""
        with self._switching:
            if self._tier is not None:
                self._tier.start()
            self._started = True
        self._prefetcher.start()

    @property
    def closed(self) -> bool:
        """Nothing is fetched any more."""
        return self._closed

    # --- requests ------------------------------------------------------------------------------------

    def prefetch(
        self, request_id: str, hashes: Sequence[str], *, deadline_s: float | None = None
    ) -> Prefetch:
        """Begin to bring the prefix `hashes` into L2; returns at once.

        With several ranks every rank calls it for the same requests in the same order. `deadline_s` from
        now nothing more is waited for, whatever the policy says.

        Raises:
            ValueError: A malformed page hash.
            StorageClosed: The controller was closed.
        """
        if self._closed:
            raise StorageClosed("this controller was closed: make a new one")
        check_page_hashes(hashes)
        return self.prefetch_more(request_id, hashes, deadline_s=deadline_s)

    def prefetch_more(
        self, request_id: str, hashes: Sequence[str], *, deadline_s: float | None = None
    ) -> Prefetch:
        """As `prefetch`, for a request that has begun: once this was closed it gets what L2 has."""
        prefetch = Prefetch(self._context, request_id, hashes, deadline_s)
        self._prefetcher.submit(prefetch)
        if self._closed:  # closed meanwhile: its thread may be gone
            self._prefetcher.finish_waiting()
            prefetch.finish()
        return prefetch

    def explain(self, request_id: str) -> Explanation:
        """Why a request that has ended got as many pages as it got.

        Raises:
            LookupError: It has not ended, or is not among the last `explained_requests`.
        """
        return self._explanations.of(request_id)

    def reserve(
        self,
        hashes: Sequence[str],
        *,
        ends: Collection[int] | None = None,
        timeout_s: float = 0.0,
    ) -> Reservation:
        """Slots in all pools for new pages, for as many leading `hashes` as there is room.

        Trailing pools have slots only in the windows in front of `ends`: the lengths, counted from the
        first of `hashes`, at which the prefix is to be usable. None: behind the last of them.

        With `timeout_s` it waits that long for room, so that pages on their way to L3 can get there.

        Raises:
            ValueError: A malformed page hash.
        """
        check_page_hashes(hashes)
        needed = self.cache.pool_set.needed_at(len(hashes), [len(hashes)] if ends is None else ends)
        groups = self.cache.allocate(needed, timeout_s=timeout_s)
        return Reservation(self.cache, list(hashes[: len(groups)]), groups)

    def commit(self, reservation: Reservation, *, without: Collection[str] = ()) -> None:
        """The reserved pages are filled in every pool: they are L2's now, and L3's by write policy.

        `without` names optional pools that were not filled: a draft that did not run.

        Raises:
            ValueError: It was committed or abandoned before, or a required pool was not filled.
        """
        pool_set = self.cache.pool_set
        unfilled = sum(1 << number for number in {pool_set.number(name) for name in without})
        if unfilled & pool_set.required:
            raise ValueError(
                f"of {sorted(without)} one is a required pool: abandon the reservation"
            )
        if not reservation.close():
            raise ValueError("this reservation was committed or abandoned before")
        entries: list[Entry] = []
        for page_hash, slots in zip(reservation.hashes, reservation.groups, strict=True):
            had = sum(1 << number for number, slot in enumerate(slots) if slot is not None)
            entry, left = self.cache.insert(page_hash, slots, filled=had & ~unfilled)
            self.cache.free([left])
            entries.append(entry)
        self._counters.add("committed_pages", len(entries))
        self._consider(entries)
        self.cache.unpin(entries)

    # --- the store -----------------------------------------------------------------------------------

    def attach(self, store: PageStore) -> None:
        """Use a store from now on. Pages of L2 count as not written there, and are by write policy.

        Raises:
            RuntimeError: A store is attached: detach it first.
            ValueError: Its pages have headers of another size than the host pools'.
            StorageClosed: The controller was closed.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces; no
                store is attached then.
        """
        with self._switching:
            if self._closed:
                raise StorageClosed("this controller was closed: make a new one")
            if self._tier is not None:
                raise RuntimeError("a store is attached already: detach it first")
            tier = self._made_tier(store)
            if self._started:
                tier.start()
            self._tier, self._whole = tier, True

    def detach(self, *, drain: bool = True, timeout_s: float = 10.0) -> bool:
        """Use the store no more; requests go on with L2 alone. Idempotent.

        Prefetches in progress end with what has arrived. With `drain`, pages that are to be written are
        written first, and True says that the store has all of them. False where one was dropped for want
        of time or not taken by the store, or where a call still runs after `timeout_s`: a store that
        hangs. Until that call returns the host pools stay registered with that store, and the pages of
        the call pinned; calling this again waits for it. Pages that were lost stay so: the answer is
        False until another store is attached.
        """
        deadline = Deadline(min(timeout_s, MAX_DURATION_S))
        with self._switching:
            whole = self._detach(deadline, drain=drain)
            return self._calls_ended(deadline) and whole

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the write queue is empty; True where the store has taken every page of it.

        False where that took longer than `timeout_s`, or where a page was dropped or not taken by the
        store meanwhile: `dropped_pages` and `unwritten_pages` count these.
        """
        tier = self._tier
        return tier is None or tier.writeback.drain(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters since the start, in pages unless their names say otherwise."""
        return {
            **self._counters.snapshot(),
            "cached_pages": len(self.cache),
            "evicted_pages": self.cache.evicted_pages,
        }

    def close(self, *, drain: bool = True, timeout_s: float = 10.0) -> bool:
        """Stop. With `drain`, pages that are to be written are written first. Idempotent.

        True and False as of `detach`; False also where a prefetch still runs after `timeout_s`. Pages of
        a call that still runs stay pinned until it returns; calling this again waits for it.
        """
        deadline = Deadline(min(timeout_s, MAX_DURATION_S))
        with self._switching:
            if not self._closed:
                self._closed = True
                self._prefetcher.stop()
                self._detach(deadline, drain=drain)
            ended = self._calls_ended(deadline)
        joined = self._prefetcher.join(max(_TO_END_S, deadline.remaining_s()))
        return self._whole and ended and joined

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _made_tier(self, store: PageStore) -> AttachedStore:
        return AttachedStore(store, self.cache, self.settings, self._counters)

    def _detach(self, deadline: Deadline, *, drain: bool) -> bool:
        """Let go of the store; False where `drain` has lost pages that were to be written."""
        tier = self._tier
        if tier is None:
            return self._whole
        # While evictions still go there too.
        owed = self.cache.unwritten() if drain and self._writes_back else []
        self._tier = None
        self._left_behind.append(tier)
        self._whole = tier.end(deadline, drain=drain, owed=owed)
        return self._whole

    def _calls_ended(self, deadline: Deadline) -> bool:
        """Wait for the calls of stores that were detached; False where one still runs."""
        self._left_behind = [tier for tier in self._left_behind if not tier.ended(deadline)]
        return not self._left_behind

    def _consider(self, entries: Sequence[Entry]) -> None:
        tier = self._tier
        if tier is not None:
            tier.writeback.consider(entries)

    def _offer(self, entries: list[Entry]) -> None:
        tier = self._tier
        if tier is None:
            self.cache.give_up(entries)
        else:
            tier.writeback.offer(entries)
