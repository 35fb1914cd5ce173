"""Pages between SGLang's host pools and the page store."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.integrations.sglang._bounce_buffers import (
    Bounce,
    copy_in,
    copy_out,
    mirrored,
    nbytes_of,
)
from hicache_storage.page import Page
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.integrations.sglang._engine import Indices
    from hicache_storage.integrations.sglang._stored_pool import StoredPool
    from hicache_storage.integrations.sglang._transfer_metrics import TransferMetrics
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.results import Outcome, Transfer

logger = logging.getLogger(__name__)

_SILENT = frozenset((Verdict.TIMEOUT, Verdict.UNAVAILABLE, Verdict.BREAKER_OPEN))


class Moved(NamedTuple):
    """What became of a batch of pages."""

    whole: list[bool]
    """Which pages were moved."""
    answered: bool
    """False: the store does not answer, and no further batch of the call is to be tried."""


class Transport:
    """Loads and saves batches of one pool's pages. Thread-safe.

    A call returns only when no memory of SGLang's is touched any more, because SGLang gives host pages
    to others after it. A bounded store gets that memory itself, and its calls end in time. Any other
    store gets buffers of ours, which an overdue call keeps.
    """

    def __init__(self, store: PageStore, traffic: TransferMetrics | None, timeout_s: float) -> None:
        self.store = store
        self.traffic = traffic
        self.writes_replicated = True
        """False: another rank saves what all ranks hold; here only what it has not saved is."""
        self.lends = store.storage.capabilities.bounded
        """SGLang's memory goes to the store itself."""
        self._timeout_s = timeout_s
        # Overdue writes are to hold up no reads.
        self._bounces = {"prefetch": Bounce(store), "backup": Bounce(store)}

    def load(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> Moved:
        """Read pages into the host pool, and tell which of them hold what was asked for."""
        pages = pool.pages.incoming(indices, len(keys))
        moved = self._run("prefetch", pool, pool.transfers(keys, indices, pages))
        pool.pages.deliver(indices, pages, moved.whole)
        return moved

    def save(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> Moved:
        """Store pages of the host pool, and tell which of them are stored now."""
        there, deadline = 0, Deadline(self._timeout_s)
        if pool.is_replicated and not self.writes_replicated:
            there = self.store.match(keys, pool.asked()).pages
        rest, places = keys[there:], indices[there * pool.host.page_size :]
        if not rest:
            return Moved([True] * there, answered=True)
        pages = pool.pages.outgoing(places, len(rest))
        left = deadline if there else None
        moved = self._run("backup", pool, pool.transfers(rest, places, pages), left)
        return Moved([True] * there + moved.whole, moved.answered)

    def load_flat(
        self, pool: StoredPool, keys: Sequence[str], targets: Sequence[Any]
    ) -> tuple[list[Any], bool]:
        """Fill tensors of SGLang's. In place of each that was not filled there is None."""
        landing = [target.contiguous() for target in targets]
        transfers = pool.flat_transfers(keys, _flats(pool, landing))
        whole, answered = self._run("prefetch", pool, transfers)
        for target, landed, there in zip(targets, landing, whole, strict=True):
            if there and landed is not target:
                target.copy_(landed)
        filled = [target if there else None for target, there in zip(targets, whole, strict=True)]
        return filled, answered

    def save_flat(self, pool: StoredPool, keys: Sequence[str], values: Sequence[Any]) -> Moved:
        """Store tensors of SGLang's."""
        flats = _flats(pool, [value.contiguous() for value in values])
        return self._run("backup", pool, pool.flat_transfers(keys, flats))

    def close(self) -> None:
        """Give up the buffers."""
        for bounce in self._bounces.values():
            bounce.close()

    def _run(
        self,
        direction: str,
        pool: StoredPool,
        transfers: list[Transfer],
        deadline: Deadline | None = None,
    ) -> Moved:
        began_s = time.monotonic()
        move = self.store.load if direction == "prefetch" else self.store.save
        timeout_s = None if deadline is None else deadline.remaining_s()
        if self.lends:
            outcome = move(transfers, timeout_s=timeout_s)
            outcome.settled.result()  # the store is bounded: this is now, or soon
        else:
            bounce = self._bounces[direction]
            buffer = bounce.take(nbytes_of(transfers))
            if buffer is None:
                logger.warning("pool %r: too many overdue calls, no %s", pool.name, direction)
                return Moved([False] * len(transfers[0].hashes), answered=False)
            copies = mirrored(transfers, buffer)
            if direction == "backup":
                copy_out(transfers, copies)
            outcome = move(copies, timeout_s=timeout_s)  # raises: who knows who has the buffer now
            if direction == "prefetch":
                copy_in(transfers, copies, outcome.whole())
            bounce.give_back(buffer, outcome.settled)
        whole = outcome.whole()
        if self.traffic is not None:
            done = whole.count(True)
            seconds = time.monotonic() - began_s
            self.traffic.add(direction, done, done * pool.page_nbytes, seconds)
        return Moved(whole, _answered(outcome))


def _answered(outcome: Outcome) -> bool:
    return not any(verdict in _SILENT for verdicts in outcome.verdicts for verdict in verdicts)


def _flats(pool: StoredPool, tensors: Sequence[Any]) -> list[memoryview]:
    if pool.is_marker:  # its tensors are empty
        return [memoryview(bytearray(1)) for _ in tensors]
    return [Page(tensor).segments[0] for tensor in tensors]
