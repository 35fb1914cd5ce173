"""L3 → L2: the missing pages of one prefix, in order, a batch of all pools at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.explain import Reason
from hicache_storage.controller.pool_set import numbers
from hicache_storage.controller.settings import WritePolicy
from hicache_storage.controller.transfer_batch import TransferBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.attached_store import AttachedStore
    from hicache_storage.controller.context import Context
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import Bits, PageSlots
    from hicache_storage.controller.prefetch import Prefetch
    from hicache_storage.page_store.results import Outcome

# Idle pages of a write-back cache make room once they are written: worth waiting for, but not for long.
_WRITE_BACK_TIMEOUT_S = 1.0


@dataclass(slots=True)
class _Row:
    """A page of a batch."""

    page: int
    page_hash: str
    bits: Bits
    """The pools that are read."""
    slots: PageSlots
    entry: Entry | None = None
    """The page of L2, pinned, that is completed; None: the slots are a new page's."""


class Loading:
    """One request's way from L3 to L2.

    A page that L2 lacks is read into slots of its own, and becomes part of L2 as far as it arrived. A
    page that L2 has in other pools is read into the slots that it has, claimed for the time of the read.
    """

    def __init__(self, context: Context, tier: AttachedStore, prefetch: Prefetch) -> None:
        self._context = context
        self._cache = context.cache
        self._tier = tier
        self._prefetch = prefetch
        self._findings = prefetch.findings
        self._vital = context.vital & context.cache.pool_set.every_page
        writes_back = context.settings.write_policy is WritePolicy.WRITE_BACK
        self._room_timeout_s = _WRITE_BACK_TIMEOUT_S if writes_back else 0.0
        self._page_nbytes = sum(pool.space.page_nbytes for pool in context.cache.pools)

    def run(self, wanted: Sequence[Bits]) -> None:
        """Load the `wanted` pools of each page, until one that no prefix can do without is missing."""
        pages = [page for page, bits in enumerate(wanted) if bits]
        limit = self._context.settings.batch_pages
        step = self._tier.in_flight.fitting(limit, self._page_nbytes)
        for start in range(0, len(pages), step):
            reason = Reason.DETACHED if self._tier.closing else self._prefetch.unwanted()
            if reason is not None:
                self._findings.stopped = reason
                return
            if not self._load({page: wanted[page] for page in pages[start : start + step]}):
                return

    def _load(self, wanted: dict[int, Bits]) -> bool:
        """Load one batch; whether it is worth going on."""
        rows = self._rows(wanted)
        traffic = TransferBatch(self._cache.pool_set)
        for row in rows:
            traffic.add(row.page_hash, row.slots, row.bits)
        outcome = self._read(rows, traffic)
        if outcome is None:
            return False
        for nth, number, verdict in traffic.failures(outcome):
            self._findings.troubles[rows[nth].page, number] = Reason.of(verdict)
        arrived = dict.fromkeys(wanted, 0)
        loaded = used = 0
        for row, ok in zip(rows, traffic.ok(outcome), strict=True):
            arrived[row.page] = ok
            loaded += bool(ok)
            used += self._land(row, ok, outcome.settled)
        self._context.counters.add("loaded_pages", loaded)
        self._context.counters.add("loaded_unused_pages", loaded - used)
        return not any(self._vital & bits & ~arrived[page] for page, bits in wanted.items())

    def _read(self, rows: list[_Row], traffic: TransferBatch) -> Outcome | None:
        """Make one call to the store, the wait for its turn included in its time.

        Returns None, and gives the slots back, where the call is not made.
        """
        if not rows:
            return None
        nbytes, in_flight, store = traffic.nbytes, self._tier.in_flight, self._tier.store
        deadline = Deadline(self._prefetch.at_most_s(store.settings.timeout_s))
        if not in_flight.enter(nbytes, deadline.remaining_s()):
            self._findings.stopped = Reason.IN_FLIGHT_LIMIT
            self._give_back(rows)
            return None
        try:
            outcome = store.load(traffic.transfers(), timeout_s=deadline.remaining_s())
        except BaseException:
            in_flight.leave(nbytes)
            self._give_back(rows)
            raise
        self._tier.track(outcome.settled)
        outcome.settled.add_done_callback(lambda _: in_flight.leave(nbytes))
        return outcome

    # --- slots: each row's come to rest exactly once -------------------------------------------------

    def _rows(self, wanted: dict[int, Bits]) -> list[_Row]:
        """The pages of a batch that there are slots for, up to the first new one that has none."""
        hashes = self._prefetch.hashes
        new = [page for page in wanted if self._prefetch.entry(page) is None]
        groups = self._slots([self._cache.pool_set.every_page | wanted[page] for page in new])
        rows = [
            _Row(page, hashes[page], wanted[page], slots)
            for page, slots in zip(new, groups, strict=False)
        ]
        if len(groups) < len(new):
            self._context.counters.add("no_host_slot_pages", len(new) - len(groups))
            self._findings.stopped = Reason.NO_HOST_SLOT
        end = new[len(groups)] if len(groups) < len(new) else len(hashes)
        known = [page for page in wanted if page < end and self._prefetch.entry(page) is not None]
        for page, entry in zip(
            known, self._cache.hold(hashes[page] for page in known), strict=True
        ):
            if entry is not None:
                rows.append(self._claimed(page, entry, wanted[page]))
        return rows

    def _slots(self, wanted: Sequence[Bits]) -> list[PageSlots]:
        """Slots for new pages, before what the request holds behind them: a prefix grows at its head."""
        groups = self._cache.allocate(wanted, timeout_s=self._room_timeout_s)
        while len(groups) < len(wanted) and self._prefetch.give_tail(len(wanted) - len(groups)):
            self._findings.stopped = Reason.NO_HOST_SLOT
            groups += self._cache.allocate(wanted[len(groups) :])
        return groups

    def _claimed(self, page: int, entry: Entry, wanted: Bits) -> _Row:
        claimed = self._cache.claim(entry, wanted)
        for number in numbers(wanted & ~claimed):
            self._findings.troubles[page, number] = Reason.BUSY
        return _Row(page, entry.page_hash, claimed, entry.slots, entry)

    def _give_back(self, rows: list[_Row]) -> None:
        self._cache.free([row.slots for row in rows if row.entry is None])
        for row in rows:
            if row.entry is not None:
                self._unclaim(row.entry, row.bits)

    def _land(self, row: _Row, ok: Bits, settled: Future[None]) -> bool:
        """What arrived is L2's, the rest is free once nobody writes into it any more.

        Whether something of the page came in time for its request.
        """
        cache, entry = self._cache, row.entry
        if entry is not None:
            cache.fill(entry, ok, stored=ok, epoch=self._tier.epoch)
            settled.add_done_callback(lambda _: self._unclaim(entry, row.bits & ~ok))
            return bool(ok) and self._prefetch.note_loaded(row.page)
        if self._vital & ~ok:
            settled.add_done_callback(lambda _: cache.free([row.slots]))
            return False
        return self._make(row, ok, settled)

    def _make(self, row: _Row, ok: Bits, settled: Future[None]) -> bool:
        """A new page of L2; whether it came in time for its request."""
        busy = 0 if settled.done() else row.bits & ~ok
        entry, left = self._cache.insert(
            row.page_hash, row.slots, filled=ok, stored=ok, busy=busy, epoch=self._tier.epoch
        )
        if busy:
            adopted = sum(1 << number for number in numbers(busy) if left[number] is None)
            self._cache.hold([row.page_hash])
            settled.add_done_callback(lambda _: self._unclaim(entry, adopted))
        if any(slot is not None for slot in left):
            settled.add_done_callback(lambda _: self._cache.free([left]))
        used = self._prefetch.add(row.page, entry)
        if not used:  # too late for this request; L2 keeps it for the next
            self._cache.unpin([entry])
        return used

    def _unclaim(self, entry: Entry, claimed: Bits) -> None:
        self._cache.unclaim(entry, claimed)
        self._cache.unpin([entry])
