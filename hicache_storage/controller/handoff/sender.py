"""The prefill side: sees to it that a request's pages are in storage, then says so."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from hicache_storage.controller.handoff.board import CompletionBoard
from hicache_storage.controller.handoff.completion import Completion, completion_hash
from hicache_storage.controller.handoff.settings import HandoffSettings
from hicache_storage.controller.pool_set import numbers
from hicache_storage.controller.traffic import PoolTraffic
from hicache_storage.counters import Counters
from hicache_storage.keys import check_page_hashes
from hicache_storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


class HandoffSender:
    """One rank of a prefill engine. Thread-safe; nothing that a store does raises or blocks here.

    A rank speaks for the pools that it writes (`CachePool.writes`): a replicated pool has one writer and
    so one completion, a sharded one a completion of each.
    """

    def __init__(
        self,
        controller: CacheController,
        store: PageStore,
        settings: HandoffSettings | None = None,
    ) -> None:
        """Open the completions' key space in `store`, which holds the controller's pages.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key space.
        """
        self.settings = settings or HandoffSettings()
        self._controller = controller
        self._store = store
        self._pools = [pool for pool in controller.cache.pools if pool.writes]
        self._board = CompletionBoard(
            store, controller.cache.pools[0].space, stale_after_s=self.settings.stale_after_s
        )
        self._counters = Counters()
        self._workers = Workers("hicache-handoff-send", 1)

    def publish(self, request_id: str, hashes: Sequence[str]) -> Future[int]:
        """Say that the request's pages are there, once they are: after its last commit.

        Pages of L2 that are not in storage by then are written, whatever the write policy. What cannot
        be written within `timeout_s` is left out: the completion tells how far the prefix goes. An
        aborted request is published like any other, so that nobody waits for it.

        Returns:
            Pages of the prefix that are in storage in every pool that this rank writes, and were posted.

        Raises:
            ValueError: A malformed page hash.
        """
        check_page_hashes(hashes)
        deadline_s = time.monotonic() + self.settings.timeout_s
        published = self._workers.submit(lambda: self._publish(request_id, hashes, deadline_s))
        published.add_done_callback(partial(_log_failure, request_id))
        return published

    def stats(self) -> dict[str, int]:
        """Requests published since the start, whole, in part or not at all."""
        return self._counters.snapshot()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the thread once everything is published; False where that takes longer. Idempotent."""
        return self._workers.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the sender's thread ----------------------------------------------------------------------

    def _publish(self, request_id: str, hashes: Sequence[str], deadline_s: float) -> int:
        if not hashes or not self._pools:
            return len(hashes)  # nothing that this rank would have to write
        self._await_writes(hashes, deadline_s)
        self._write_missing(hashes, deadline_s)
        pages = self._stored(hashes)
        posted = self._post(request_id, hashes, pages, deadline_s)
        least = min(pages.values()) if posted else 0
        outcome = "published" if least == len(hashes) else "published_in_part"
        self._counters.add(outcome if posted else "unpublished")
        return least

    def _await_writes(self, hashes: Sequence[str], deadline_s: float) -> None:
        """Until none of these pages is in the write queue; others' may be."""
        cache = self._controller.cache
        held = [entry for entry in cache.hold(hashes) if entry is not None]
        while any(entry.queued for entry in held):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._controller.drain(min(_LOOK_S, left_s)):
                break
        cache.unpin(held)

    def _write_missing(self, hashes: Sequence[str], deadline_s: float) -> None:
        """Write what L2 has and storage has not: dropped from the queue, evicted there, or kept back.

        Optional pools go after all that are required, as the controller's own writes do.
        """
        pool_set = self._controller.cache.pool_set
        owed = self._missing(hashes)
        for part in (pool_set.required, pool_set.everything & ~pool_set.required):
            left_s = deadline_s - time.monotonic()
            if left_s > 0 and any(bits & part for bits in owed):
                self._write(hashes, [bits & part for bits in owed], left_s)

    def _write(self, hashes: Sequence[str], owed: Sequence[Bits], timeout_s: float) -> None:
        cache = self._controller.cache
        entries = cache.hold(hashes)
        held = [entry for entry in entries if entry is not None]
        traffic = PoolTraffic(cache.pool_set)
        for entry, bits in zip(entries, owed, strict=True):
            if entry is not None:
                traffic.add(entry.page_hash, entry.slots, entry.filled & bits)
        try:
            outcome = self._store.save(traffic.transfers(), timeout_s=timeout_s)
        except BaseException:
            cache.unpin(held)
            raise
        self._counters.add("written_pages", sum(map(len, outcome.verdicts)))
        # A call that overran may still read these slots: they stay pinned until it is over.
        outcome.settled.add_done_callback(lambda _: cache.unpin(held))

    def _missing(self, hashes: Sequence[str]) -> list[Bits]:
        """For each page, the pools that this rank writes, that the prefix needs, and storage lacks."""
        pool_set = self._controller.cache.pool_set
        missing = [0] * len(hashes)
        for number in numbers(pool_set.written):
            parts = [
                self._store.present(stored.space, hashes)
                for stored in pool_set.pools[number].stored
            ]
            for page, present in enumerate(zip(*parts, strict=True)):
                if not all(present):
                    missing[page] |= 1 << number & pool_set.needed(page, len(hashes))
        return missing

    def _stored(self, hashes: Sequence[str]) -> dict[KeySpace, int]:
        """For each shard that this rank writes: how many leading pages a reader would find."""
        return {
            stored.space: self._store.match(hashes, [stored]).pages
            for pool in self._pools
            for stored in pool.stored
        }

    def _post(
        self,
        request_id: str,
        hashes: Sequence[str],
        pages: Mapping[KeySpace, int],
        deadline_s: float,
    ) -> bool:
        """Post a completion for each shard until all are up, or time is; whether all are."""
        now_s = time.time()
        left = {
            completion_hash(request_id, space, hashes): Completion.of(
                request_id, space, hashes, count, now_s
            )
            for space, count in pages.items()
        }
        while True:
            refused = self._board.post(left)
            left = {key: left[key] for key in refused}
            if not left:
                return True
            if time.monotonic() >= deadline_s:
                logger.warning(
                    "request %r: %d of %d completions were not posted: its decode side will time out",
                    request_id,
                    len(left),
                    len(pages),
                )
                return False
            time.sleep(_LOOK_S)


def _log_failure(request_id: str, published: Future[int]) -> None:
    """Tell of it, as nobody need wait for what `publish` returns."""
    if not published.cancelled() and (error := published.exception()):
        logger.error("request %r was not published: %s", request_id, error, exc_info=error)
