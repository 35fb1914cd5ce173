"""The cache controller: it prefetches pages before a request runs, and writes pages afterwards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.attached_store import AttachedStore
from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.consensus import Consensus
from hicache_storage.controller.explain import Explanations
from hicache_storage.controller.lease import Reservation
from hicache_storage.controller.prefetch import Prefetch
from hicache_storage.controller.prefetch_job import PrefetchContext, PrefetchJob
from hicache_storage.controller.prefetch_quota import PrefetchQuota
from hicache_storage.controller.prefetch_worker import PrefetchWorker
from hicache_storage.controller.ranks import SingleRank
from hicache_storage.controller_settings import (
    MIN_END_WAIT_S,
    ControllerSettings,
    PartialHits,
    WritePolicy,
)
from hicache_storage.errors import StorageClosed
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller.explain import Explanation
    from hicache_storage.controller.pools import CachePool
    from hicache_storage.controller.ranks import Ranks
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.admission import Admission
    from hicache_storage.request_log import ExplainLog


class CacheController:
    """The cache of one engine: L2 in host pools, L3 in a page store, and transfers between them.

    All pools of a page (target, draft) are allocated, loaded, written and evicted together. Thread-safe.
    If the store fails, requests get fewer hits but go on: the failure raises no error, and no call waits
    longer than the prefetch policy allows.

    Close the host pools, the page store and the ranks yourself, after the controller.

    Examples:
        >>> from hicache_storage import KeySpace, Shard, page_hashes
        >>> from hicache_storage.controller import CacheController, CachePool
        >>> from hicache_storage.host_pool import HostPool, PageShape
        >>> shape = PageShape.mha(page_tokens=2, layers=1, heads=1, head_dim=8, dtype="bfloat16")
        >>> space = KeySpace(model="my/model", dtype="bfloat16", layout="page_first", page_tokens=2,
        ...                  page_nbytes=shape.nbytes, shard=Shard(layers=(0, 1), heads=(0, 1)))
        >>> pool = CachePool(space=space, host=HostPool(shape, slots=4))
        >>> hashes = page_hashes([1, 2, 3, 4], page_tokens=2)
        >>> with CacheController(None, [pool]) as controller:  # no store: L2 alone
        ...     controller.commit(controller.reserve(hashes[:1]))
        ...     with controller.prefetch("request-1", hashes).result() as lease:
        ...         lease.pages
        1
    """

    def __init__(
        self,
        store: PageStore | None,
        pools: Sequence[CachePool],
        settings: ControllerSettings | None = None,
        *,
        ranks: Ranks | None = None,
        admission: Admission | None = None,
        explain_log: ExplainLog | None = None,
    ) -> None:
        """Open the key spaces of the pools. Without a store the cache is L2 alone, until `attach`.

        An `admission` decides for each page whether it is written to the store. An `explain_log` gets a
        record of each request, and of each write that left pages out. Close the log yourself.

        Raises:
            ValueError: There is no pool, the pools do not fit together, or there are several ranks and
                several prefetch threads.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: A key space could not be opened.
        """
        self.settings: ControllerSettings = settings or ControllerSettings()
        self._admission = admission
        self._explain_log = explain_log
        ranks = ranks or SingleRank()
        self.ranks: Ranks = ranks
        if ranks.size > 1 and self.settings.prefetch_threads > 1:
            raise ValueError(
                f"{ranks.size} ranks agree on their requests one after another:"
                f" prefetch_threads must be 1, not {self.settings.prefetch_threads}"
            )
        self._writes_back = self.settings.write_policy is WritePolicy.WRITE_BACK
        self.cache: HostCache = HostCache(
            pools, write_back=self._enqueue if self._writes_back else None
        )
        self._counters = Counters()
        self._explanations = Explanations(self.settings.explained_requests)
        self._context = self._make_context(ranks)
        self.consensus: Consensus = self._context.consensus
        """How this engine's ranks agree on requests."""
        self._prefetch_worker = PrefetchWorker(self._context)
        self._attached: AttachedStore | None = None
        self._busy_detached: list[AttachedStore] = []
        """Stores that were detached while a call was running."""
        self._all_written = True
        """False if a page that should have been written before the last detach was lost."""
        self._attach_lock = threading.Lock()
        self._started = self._closed = False
        if store is not None:
            self._attached = self._open(store)

    def start(self) -> None:
        """Register the host pools with the store, and start the threads."""
        with self._attach_lock:
            if self._attached is not None:
                self._attached.start()
            self._started = True
        self._prefetch_worker.start()

    @property
    def closed(self) -> bool:
        """True once the controller has been closed. No page is prefetched from then on."""
        return self._closed

    # --- requests ------------------------------------------------------------------------------------

    def prefetch(
        self, request_id: str, hashes: Sequence[str], *, deadline_s: float | None = None
    ) -> Prefetch:
        """Start to load the prefix `hashes` into L2, and return at once.

        With several ranks, call it on every rank, for the same requests in the same order. The request's
        deadline is `deadline_s` from now. No call waits beyond the deadline, whatever the prefetch
        policy says.

        Raises:
            ValueError: A page hash is malformed.
            StorageClosed: The controller was closed.
            RuntimeError: The controller was not started.
        """
        if self._closed:
            raise StorageClosed("this controller was closed: create a new one")
        if not self._started:
            raise RuntimeError(
                "this controller was not started, so no thread would load the pages: call start()"
                " first, or use the controller in a `with` statement"
            )
        check_page_hashes(hashes)
        return self.prefetch_again(request_id, hashes, deadline_s=deadline_s)

    def prefetch_again(
        self, request_id: str, hashes: Sequence[str], *, deadline_s: float | None = None
    ) -> Prefetch:
        """Start another prefetch of a request. After `close`, it finds only pages that are in L2."""
        job = PrefetchJob(self._context, request_id, hashes, deadline_s)
        self._prefetch_worker.submit(job)
        if self._closed:  # the controller was closed meanwhile, and the thread may have ended
            self._prefetch_worker.finish_queued()
            job.finish()
        return Prefetch(self._context, job)

    def explain(self, request_id: str) -> Explanation:
        """Return why a request that has ended got as many pages as it did.

        Raises:
            LookupError: The request has not ended, or is not among the last `explained_requests`.
        """
        return self._explanations.get(request_id)

    def reserve(
        self,
        hashes: Sequence[str],
        *,
        ends: Collection[int] | None = None,
        timeout_s: float = 0.0,
    ) -> Reservation:
        """Reserve slots in all pools for new pages: as many leading `hashes` as L2 has space for.

        `ends` are the lengths, counted from the first of `hashes`, at which the prefix must be usable.
        Trailing pools get slots only in the windows before these lengths. None stands for the full
        length alone.

        With `timeout_s` the call waits up to that long for slots of the first page. For the other pages
        it waits only while pages are being written to L3 so that they can be evicted.

        Raises:
            ValueError: A page hash is malformed.
        """
        check_page_hashes(hashes)
        needed = self.cache.pool_set.needed_at(len(hashes), [len(hashes)] if ends is None else ends)
        groups = self.cache.allocate(needed, timeout_s=timeout_s)
        return Reservation(self.cache, list(hashes[: len(groups)]), groups)

    def commit(self, reservation: Reservation, *, without: Collection[str] = ()) -> None:
        """Add reserved pages that you have filled to L2. The write policy selects those that go to L3.

        `without` names optional pools that you did not fill, such as the draft's if it did not run.

        Raises:
            ValueError: The reservation has already ended, or a required pool was not filled.
        """
        pool_set = self.cache.pool_set
        unfilled = sum(1 << number for number in {pool_set.number(name) for name in without})
        if unfilled & pool_set.required:
            raise ValueError(
                f"one of {sorted(without)} is a required pool: abandon the reservation"
            )
        if not reservation.close():
            raise ValueError("this reservation was already committed or abandoned")
        entries: list[Entry] = []
        for page_hash, slots in zip(reservation.hashes, reservation.groups, strict=True):
            reserved = sum(1 << number for number, slot in enumerate(slots) if slot is not None)
            entry, unused = self.cache.insert(page_hash, slots, filled=reserved & ~unfilled)
            self.cache.free([unused])
            entries.append(entry)
        self._counters.add("committed_pages", len(entries))
        self._offer(entries)
        self.cache.unpin(entries)

    # --- the store -----------------------------------------------------------------------------------

    def attach(self, store: PageStore) -> None:
        """Use a store from now on.

        No page of L2 counts as stored in the new store. The write policy selects which pages are
        written.

        Raises:
            RuntimeError: Another store is attached.
            StorageClosed: The controller was closed.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: A key space could not be opened. No
                store is attached then.
        """
        with self._attach_lock:
            if self._closed:
                raise StorageClosed("this controller was closed: create a new one")
            if self._attached is not None:
                raise RuntimeError("a store is attached already: detach it first")
            attached = self._open(store)
            if self._started:
                attached.start()
            self._attached, self._all_written = attached, True

    def detach(self, *, drain: bool = True, timeout_s: float = 10.0) -> bool:
        """Stop using the store. Requests go on with L2 alone. Idempotent.

        Prefetches in progress end with the pages that have arrived. With `drain`, pages that are waiting
        to be written are written first.

        Return True if no page was lost and no call of the store is running. A page is lost if it is
        dropped for lack of time or if the store does not take it. After a loss the result stays False
        until another store is attached. If the store hangs, a call may still run after `timeout_s`.
        Until that call returns, the host pools stay registered with that store, and the pages of the
        call stay pinned. Call `detach` again to wait for it.
        """
        deadline = Deadline(timeout_s)
        with self._attach_lock:
            all_written = self._detach(deadline, drain=drain)
            return self._wait_calls(deadline) and all_written

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the write queue is empty. Return True if the store has taken every page.

        Return False if the queue is not empty after `timeout_s`, or if a page is dropped or the store
        does not take it meanwhile. `dropped_pages` and `unwritten_pages` count such pages.
        """
        attached = self._attached
        return attached is None or attached.writeback.drain(timeout_s)

    def stats(self) -> dict[str, int]:
        """Return counters since the start. They count pages unless their names say otherwise."""
        return {
            **self._counters.snapshot(),
            **({} if self._admission is None else self._admission.stats()),
            "cached_pages": len(self.cache),
            "evicted_pages": self.cache.evicted_pages,
        }

    def close(self, *, drain: bool = True, timeout_s: float = 10.0) -> bool:
        """Detach the store, and stop the threads. Idempotent.

        Return what `detach` returns, or False if a prefetch still runs after `timeout_s`. If a call
        still runs, its pages stay pinned until it returns. Call `close` again to wait for it.
        """
        deadline = Deadline(timeout_s)
        with self._attach_lock:
            if not self._closed:
                self._closed = True
                self._prefetch_worker.stop()
                self._detach(deadline, drain=drain)
            idle = self._wait_calls(deadline)
        joined = self._prefetch_worker.join(max(MIN_END_WAIT_S, deadline.remaining_s()))
        return self._all_written and idle and joined

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_context(self, ranks: Ranks) -> PrefetchContext:
        pool_set = self.cache.pool_set
        shorten = self.settings.partial_hits is PartialHits.SHORTEN
        hit_pools = pool_set.all_pools if shorten else pool_set.required
        return PrefetchContext(
            cache=self.cache,
            settings=self.settings,
            counters=self._counters,
            consensus=Consensus(ranks, self._counters, pool_set, hit_pools),
            explanations=self._explanations,
            quota=PrefetchQuota(self.settings.prefetch_capacity * pool_set.capacity_pages),
            attached=lambda: self._attached,
            offer=self._offer,
            hit_pools=hit_pools,
            explain_log=self._explain_log,
        )

    def _open(self, store: PageStore) -> AttachedStore:
        return AttachedStore(
            store,
            self.cache,
            self.settings,
            self._counters,
            admission=self._admission,
            explain_log=self._explain_log,
        )

    def _detach(self, deadline: Deadline, *, drain: bool) -> bool:
        """Detach the store. Return False if `drain` is set and a page was lost."""
        attached = self._attached
        if attached is None:
            return self._all_written
        # Claim pages before the store is detached: until then, evicted pages still go into its queue.
        unsaved = self.cache.claim_unsaved() if drain and self._writes_back else []
        self._attached = None
        self._busy_detached.append(attached)
        self._all_written = attached.detach(deadline, drain=drain, unsaved=unsaved)
        return self._all_written

    def _wait_calls(self, deadline: Deadline) -> bool:
        """Wait for the calls of detached stores. Return False if one still runs."""
        self._busy_detached = [each for each in self._busy_detached if not each.wait_idle(deadline)]
        return not self._busy_detached

    def _offer(self, entries: Sequence[Entry]) -> None:
        attached = self._attached
        if attached is not None:
            attached.writeback.offer(entries)

    def _enqueue(self, entries: list[Entry]) -> None:
        attached = self._attached
        if attached is None:
            self.cache.abandon_writes(entries)
        else:
            attached.writeback.enqueue(entries)
