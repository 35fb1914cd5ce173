"""Pages between SGLang's host pools and the page store."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.integrations.sglang._engine import Indices
    from hicache_storage.integrations.sglang._stored_pool import StoredPool
    from hicache_storage.integrations.sglang._traffic import Traffic
    from hicache_storage.page_store import PageStore
    from hicache_storage.transfer import Outcome, Transfer

logger = logging.getLogger(__name__)


class Transport:
    """Loads and saves batches of one pool's pages. Thread-safe.

    A call returns only when no memory of it is touched any more, because SGLang gives host pages to
    others after it. A store that overruns its deadline therefore holds up the thread that called, for
    as long as the backend's own `timeout_s` lets it.
    """

    def __init__(self, store: PageStore, traffic: Traffic | None) -> None:
        self.store = store
        self.traffic = traffic
        self.writes_replicated = True
        """False: another rank saves what all ranks hold; here only what it has not saved is."""

    def load(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> list[bool]:
        """Read pages into the host pool; which of them hold what was asked for."""
        pages = pool.pages.incoming(indices, len(keys))
        whole = self._run("prefetch", pool, pool.transfers(keys, indices, pages))
        pool.pages.deliver(indices, pages, whole)
        return whole

    def save(self, pool: StoredPool, keys: Sequence[str], indices: Indices) -> list[bool]:
        """Store pages of the host pool; which of them are stored now."""
        there = 0
        if pool.is_replicated and not self.writes_replicated:
            there = self.store.match(keys, pool.asked()).pages
        rest, places = keys[there:], indices[there * pool.host.page_size :]
        if not rest:
            return [True] * there
        pages = pool.pages.outgoing(places, len(rest))
        return [True] * there + self._run("backup", pool, pool.transfers(rest, places, pages))

    def load_flat(self, pool: StoredPool, keys: Sequence[str], targets: Sequence[Any]) -> list[Any]:
        """Fill tensors of SGLang's; in place of each that was not filled, None."""
        landing = [target.contiguous() for target in targets]
        transfers = pool.flat_transfers(keys, _flats(pool, landing))
        whole = self._run("prefetch", pool, transfers)
        for target, landed, there in zip(targets, landing, whole, strict=True):
            if there and landed is not target:
                target.copy_(landed)
        return [target if there else None for target, there in zip(targets, whole, strict=True)]

    def save_flat(self, pool: StoredPool, keys: Sequence[str], values: Sequence[Any]) -> list[bool]:
        """Store tensors of SGLang's."""
        flats = _flats(pool, [value.contiguous() for value in values])
        return self._run("backup", pool, pool.flat_transfers(keys, flats))

    def _run(self, direction: str, pool: StoredPool, transfers: list[Transfer]) -> list[bool]:
        began_s = time.monotonic()
        move = self.store.load if direction == "prefetch" else self.store.save
        outcome = move(transfers)
        whole = outcome.whole()
        _await_settled(outcome, direction, pool)
        if self.traffic is not None:
            done = whole.count(True)
            seconds = time.monotonic() - began_s
            self.traffic.add(direction, done, done * pool.page_nbytes, seconds)
        return whole


def _await_settled(outcome: Outcome, direction: str, pool: StoredPool) -> None:
    if not outcome.settled.done():
        logger.warning(
            "%s of pool %r is overdue: waiting until the store lets go of its pages",
            direction,
            pool.name,
        )
    outcome.settled.result()


def _flats(pool: StoredPool, tensors: Sequence[Any]) -> list[memoryview]:
    if pool.is_marker:  # its tensors are empty
        return [memoryview(bytearray(1)) for _ in tensors]
    return [Page(tensor).segments[0] for tensor in tensors]
