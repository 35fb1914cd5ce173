"""The prefill side: sees to it that a request's pages are in storage, then says so."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.controller.pool_set import numbers
from hicache_storage.controller.topic import shown
from hicache_storage.controller.transfer_batch import TransferBatch
from hicache_storage.handoff.completion import Completion, completion_hash
from hicache_storage.handoff.completion_store import CompletionStore
from hicache_storage.handoff.settings import HandoffSettings
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.lookup import PoolSpec
    from hicache_storage.page_store.results import Match

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
        self._board = CompletionStore(
            store, controller.cache.pools[0].space, stale_after_s=self.settings.stale_after_s
        )
        self._counters = Counters()
        self._workers = DaemonExecutor("hicache-handoff-send", 1)

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
        deadline = Deadline(self.settings.timeout_s)
        published = self._workers.submit(lambda: self._publish(request_id, hashes, deadline))
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

    def _publish(self, request_id: str, hashes: Sequence[str], deadline: Deadline) -> int:
        if not hashes or not self._pools:
            return len(hashes)  # nothing that this rank would have to write
        self._controller.cache.wait_written(hashes, deadline.remaining_s())
        self._write_missing(hashes, deadline)
        # Whatever the writes have left of the time: what came of them is looked up, and posted.
        telling = Deadline(max(deadline.remaining_s(), self._store.settings.timeout_s))
        pages = self._stored(hashes, deadline, telling)
        posted = self._post(request_id, hashes, pages, deadline)
        least = min(pages.values()) if posted else 0
        outcome = "published" if least == len(hashes) else "published_in_part"
        self._counters.add(outcome if posted else "unpublished")
        return least

    def _write_missing(self, hashes: Sequence[str], deadline: Deadline) -> None:
        """Write what L2 has and storage has not: dropped from the queue, evicted there, or kept back.

        Optional pools go after all that are required, as the controller's own writes do, and only for
        pages of which storage has these.
        """
        required = self._controller.cache.pool_set.required
        missing = self._missing(hashes, deadline)
        lacking = [bits & required for bits in missing]
        if any(lacking):
            written = self._write(hashes, lacking, deadline)
            lacking = [bits & ~ok for bits, ok in zip(lacking, written, strict=True)]
        optional = [
            0 if lacks else bits & ~required for lacks, bits in zip(lacking, missing, strict=True)
        ]
        if any(optional):
            self._write(hashes, optional, deadline)

    def _write(self, hashes: Sequence[str], owed: Sequence[Bits], deadline: Deadline) -> list[Bits]:
        """Write the pools that are `owed` of each page; those that storage has by that."""
        cache = self._controller.cache
        if deadline.passed():
            return [0] * len(hashes)
        entries = cache.hold(hashes)
        held = [entry for entry in entries if entry is not None]
        traffic = TransferBatch(cache.pool_set)
        for entry, bits in zip(entries, owed, strict=True):
            if entry is None:
                traffic.add("", [], 0)
            else:
                traffic.add(entry.page_hash, entry.slots, entry.filled & bits)
        try:
            outcome = self._store.save(traffic.transfers(), timeout_s=deadline.remaining_s())
        except BaseException:
            cache.unpin(held)
            raise
        written = traffic.ok(outcome)
        self._counters.add("written_pages", sum(map(int.bit_count, written)))
        # A call that overran may still read these slots: they stay pinned until it is over.
        outcome.settled.add_done_callback(lambda _: cache.unpin(held))
        return written

    def _missing(self, hashes: Sequence[str], deadline: Deadline) -> list[Bits]:
        """For each page, the pools that this rank writes, that the prefix needs, and storage lacks.

        Of a pool that storage cannot say it of, nothing is: it would not take the pages either.
        """
        pool_set = self._controller.cache.pool_set
        missing = [0] * len(hashes)
        for number in numbers(pool_set.written):
            parts = [
                match.present[0]
                for stored in pool_set.pools[number].stored
                if (match := self._matched(hashes, stored, deadline, deadline, past_gaps=True))
            ]
            if len(parts) < len(pool_set.pools[number].stored):
                continue
            for page, present in enumerate(zip(*parts, strict=True)):
                if not all(present):
                    missing[page] |= 1 << number & pool_set.needed(page, len(hashes))
        return missing

    def _stored(
        self, hashes: Sequence[str], deadline: Deadline, telling: Deadline
    ) -> dict[KeySpace, int]:
        """For each shard that this rank writes: how many leading pages a reader would find.

        A shard that storage cannot say it of is left out: nothing is known of it.
        """
        shards = [stored for pool in self._pools for stored in pool.stored]
        return {
            stored.space: match.pages
            for stored in shards
            if (match := self._matched(hashes, stored, deadline, telling)) is not None
        }

    def _matched(
        self,
        hashes: Sequence[str],
        stored: PoolSpec,
        deadline: Deadline,
        telling: Deadline,
        *,
        past_gaps: bool = False,
    ) -> Match | None:
        """What storage has, asked again until the deadline; None where it could not say by then.

        The answer to the last question may come until the time for `telling` is up.
        """
        while True:
            left_s = min(telling.remaining_s(), self._store.settings.timeout_s)
            match = self._store.match(hashes, [stored], past_gaps=past_gaps, timeout_s=left_s)
            if match.failures[0] is None:
                return match
            if deadline.passed():
                return None
            time.sleep(min(_LOOK_S, deadline.remaining_s()))

    def _post(
        self,
        request_id: str,
        hashes: Sequence[str],
        pages: Mapping[KeySpace, int],
        deadline: Deadline,
    ) -> bool:
        """Post a completion for each shard until all are up, or time is; whether all are."""
        now_s = time.time()
        left = {
            completion_hash(request_id, space, hashes): Completion.of(
                request_id, space, hashes, count, now_s
            )
            for space, count in pages.items()
        }
        unknown = sum(len(pool.stored) for pool in self._pools) - len(pages)
        while left:
            refused = self._board.post(left)
            left = {key: left[key] for key in refused}
            if deadline.passed():
                break
            if left:
                time.sleep(min(_LOOK_S, deadline.remaining_s()))
        if left or unknown:
            logger.warning(
                "request %s: %d of %d completions were not posted: its decode side will time out",
                shown(request_id),
                len(left) + unknown,
                len(pages) + unknown,
            )
        return not (left or unknown)


def _log_failure(request_id: str, published: Future[int]) -> None:
    """Tell of it, as nobody need wait for what `publish` returns."""
    if not published.cancelled() and (error := published.exception()):
        logger.error("request %s was not published: %s", shown(request_id), error, exc_info=error)
