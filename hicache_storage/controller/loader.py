"""Load the missing pages of one prefix from L3 to L2, in order, one batch of all pools at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.pools import pool_numbers
from hicache_storage.controller.transfer_batch import TransferBatch
from hicache_storage.request_log.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller.pools import PageSlots, PoolBits
    from hicache_storage.controller.prefetch_job import PrefetchContext, PrefetchJob
    from hicache_storage.page_store.results import Outcome


@dataclass(slots=True)
class _Row:
    """A page of a batch."""

    page: int
    page_hash: str
    bits: PoolBits
    """The pools that are read."""
    slots: PageSlots
    entry: Entry | None = None
    """The pinned page of L2 whose slots are filled. None: the page is new to L2."""


class PrefixLoader:
    """A loader of the prefix of one request, from L3 to L2.

    A page that L2 lacks is read into new slots, and is inserted with the pools that arrived. A page that
    L2 has in other pools is read into its own slots, which are claimed during the read.
    """

    def __init__(self, context: PrefetchContext, attached: AttachedStore, job: PrefetchJob) -> None:
        self._context = context
        self._cache = context.cache
        self._attached = attached
        self._job = job
        self._diagnostics = job.diagnostics
        self._essential_pools = context.hit_pools & context.cache.pool_set.all_pages
        """The pools that every page of a prefix needs."""
        self._page_nbytes = sum(pool.space.page_nbytes for pool in context.cache.pools)

    def load(self, wanted: Sequence[PoolBits]) -> None:
        """Load the `wanted` pools of each page, up to a missing page that ends the prefix."""
        pages = [page for page, bits in enumerate(wanted) if bits]
        step, limit_nbytes = (
            self._context.settings.batch_pages,
            self._attached.in_flight.limit_nbytes,
        )
        if limit_nbytes is not None:
            step = max(1, min(step, limit_nbytes // self._page_nbytes))
        for start in range(0, len(pages), step):
            reason = self._stop_reason()
            if reason is not None:
                self._diagnostics.stopped = reason
                return
            if not self._load_batch({page: wanted[page] for page in pages[start : start + step]}):
                return

    def _stop_reason(self) -> Reason | None:
        return Reason.DETACHED if self._attached.closing else self._job.stop_reason()

    def _load_batch(self, wanted: dict[int, PoolBits]) -> bool:
        """Load one batch. Return False if the prefix ends in it, because a page is missing."""
        rows = self._rows(wanted)
        batch = TransferBatch(self._cache.pool_set)
        for row in rows:
            batch.add(row.page_hash, row.slots, row.bits)
        outcome = self._read(rows, batch)
        if outcome is None:
            return False
        for index, number, verdict in batch.failures(outcome):
            self._diagnostics.failures[rows[index].page, number] = Reason.of(verdict)
        arrived = dict.fromkeys(wanted, 0)
        loaded = used = 0
        for row, ok in zip(rows, batch.succeeded(outcome), strict=True):
            arrived[row.page] = ok
            loaded += bool(ok)
            used += self._publish(row, ok)
        self._context.counters.add("loaded_pages", loaded)
        self._context.counters.add("loaded_unused_pages", loaded - used)
        return not any(
            self._essential_pools & bits & ~arrived[page] for page, bits in wanted.items()
        )

    def _read(self, rows: list[_Row], batch: TransferBatch) -> Outcome | None:
        """Read a batch with one call to the store. The timeout includes the wait for the call's turn.

        If no call is made, free the slots and return None.
        """
        if not rows:
            return None
        nbytes, in_flight, store = batch.nbytes, self._attached.in_flight, self._attached.store
        deadline = Deadline(self._job.bounded_s(store.settings.timeout_s))
        if not in_flight.acquire(nbytes, deadline.remaining_s()):
            self._diagnostics.stopped = Reason.IN_FLIGHT_LIMIT
            self._give_back(rows)
            return None
        try:
            return store.load(batch.transfers(), timeout_s=deadline.remaining_s())
        except BaseException:
            self._give_back(rows)
            raise
        finally:
            in_flight.release(nbytes)

    # --- slots: each row's slots are published or freed exactly once ---------------------------------

    def _rows(self, wanted: dict[int, PoolBits]) -> list[_Row]:
        """Return the pages of a batch that have slots, up to the first new page without slots."""
        hashes = self._job.hashes
        new = [page for page in wanted if self._job.entry(page) is None]
        groups = self._allocate([self._cache.pool_set.all_pages | wanted[page] for page in new])
        rows = [
            _Row(page, hashes[page], wanted[page], slots)
            for page, slots in zip(new, groups, strict=False)
        ]
        if len(groups) < len(new):
            self._context.counters.add("no_host_slot_pages", len(new) - len(groups))
            self._diagnostics.stopped = Reason.NO_HOST_SLOT
        end = new[len(groups)] if len(groups) < len(new) else len(hashes)
        known = [page for page in wanted if page < end and self._job.entry(page) is not None]
        for page, entry in zip(known, self._cache.pin(hashes[page] for page in known), strict=True):
            if entry is not None:
                rows.append(self._claim(page, entry, wanted[page]))
        return rows

    def _allocate(self, wanted: Sequence[PoolBits]) -> list[PageSlots]:
        """Return slots for new pages. If necessary, evict pages from the request's own tail."""
        groups = self._allocate_in_time(wanted)
        while len(groups) < len(wanted) and self._job.release_tail(len(wanted) - len(groups)):
            self._diagnostics.stopped = Reason.NO_HOST_SLOT
            groups += self._allocate_in_time(wanted[len(groups) :])
        return groups

    def _allocate_in_time(self, wanted: Sequence[PoolBits]) -> list[PageSlots]:
        """Return slots. While evicted pages are being written, wait for up to the store's timeout."""
        return self._cache.allocate(
            wanted,
            timeout_s=self._job.bounded_s(self._attached.store.settings.timeout_s),
            stop=lambda: not self._cache.evicting_pages or self._stop_reason() is not None,
        )

    def _claim(self, page: int, entry: Entry, wanted: PoolBits) -> _Row:
        claimed = self._cache.claim(entry, wanted)
        for number in pool_numbers(wanted & ~claimed):
            self._diagnostics.failures[page, number] = Reason.BUSY
        return _Row(page, entry.page_hash, claimed, entry.slots, entry)

    def _give_back(self, rows: list[_Row]) -> None:
        self._cache.free([row.slots for row in rows if row.entry is None])
        for row in rows:
            if row.entry is not None:
                self._unclaim(row.entry, row.bits)

    def _publish(self, row: _Row, ok: PoolBits) -> bool:
        """Publish the slots that were loaded, and free the others.

        Return True if the page arrived before the job ended, so that the job uses it.
        """
        cache, entry = self._cache, row.entry
        if entry is not None:
            cache.fill(entry, ok, stored=ok, epoch=self._attached.epoch)
            self._unclaim(entry, row.bits & ~ok)
            return bool(ok) and self._job.add_loaded(row.page, entry)
        if self._essential_pools & ~ok:
            cache.free([row.slots])
            return False
        return self._insert(row, ok)

    def _insert(self, row: _Row, ok: PoolBits) -> bool:
        """Insert a new page into L2. Return True if it arrived before the job ended."""
        entry, unused = self._cache.insert(
            row.page_hash, row.slots, filled=ok, stored=ok, epoch=self._attached.epoch
        )
        self._cache.free([unused])
        in_time = self._job.add_loaded(row.page, entry)
        if not in_time:  # L2 keeps the page for the next request
            self._cache.unpin([entry])
        return in_time

    def _unclaim(self, entry: Entry, claimed: PoolBits) -> None:
        self._cache.unclaim(entry, claimed)
        self._cache.unpin([entry])
