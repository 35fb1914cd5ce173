"""The prefill side, which writes a request's pages to storage, then posts their completions."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Self

from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.executor import DaemonExecutor
from hicache_storage.controller.pools import pool_numbers
from hicache_storage.controller.ranks import shown_id
from hicache_storage.controller.transfer_batch import TransferBatch
from hicache_storage.handoff.completion import Completion, completion_hash
from hicache_storage.handoff.completion_store import CompletionStore
from hicache_storage.handoff.settings import HandoffSettings
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.pools import PoolBits
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.lookup import PoolSpec
    from hicache_storage.page_store.results import Match

logger: logging.Logger = logging.getLogger(__name__)

_RETRY_S = 0.1


class HandoffSender:
    """The sender of one rank of a prefill engine. Thread-safe.

    No method raises or blocks because a store fails. A rank posts completions for the pools that it
    writes (`CachePool.writes`). A replicated pool has one writer, so it has one completion. A sharded
    pool has a completion from each writer.
    """

    def __init__(
        self,
        controller: CacheController,
        store: PageStore,
        settings: HandoffSettings | None = None,
    ) -> None:
        """Open the completions' key space in `store`, which also holds the controller's pages.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: The key space could not be opened.
        """
        self.settings: HandoffSettings = settings or HandoffSettings()
        self._controller = controller
        self._store = store
        self._pools = [pool for pool in controller.cache.pools if pool.writes]
        self._completions = CompletionStore(
            store, controller.cache.pools[0].space, stale_after_s=self.settings.stale_after_s
        )
        self._counters = Counters()
        self._executor = DaemonExecutor("hicache-handoff-send", 1)

    def publish(self, request_id: str, hashes: Sequence[str]) -> Future[int]:
        """Post the request's completions once its pages are in storage. Call it after the last commit.

        Pages of L2 that are not in storage by then are written, whatever the write policy is. The
        completion gives the length of the prefix that was written within `timeout_s`. Publish an aborted
        request, too, so that no decode engine waits for it.

        Returns:
            The length of the posted prefix: storage has its pages in every pool that this rank writes.

        Raises:
            ValueError: A page hash is malformed.
        """
        check_page_hashes(hashes)
        deadline = Deadline(self.settings.timeout_s)
        published = self._executor.submit(lambda: self._publish(request_id, hashes, deadline))
        published.add_done_callback(partial(_log_failure, request_id))
        return published

    def stats(self) -> dict[str, int]:
        """Return how many requests were published in whole, in part or not at all, since the start."""
        return self._counters.snapshot()

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the queued requests. Return False after `timeout_s`. Idempotent."""
        return self._executor.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the sender's thread ----------------------------------------------------------------------

    def _publish(self, request_id: str, hashes: Sequence[str], deadline: Deadline) -> int:
        if not hashes or not self._pools:
            return len(hashes)  # this rank writes none of the request's pages
        self._controller.cache.wait_written(hashes, deadline.remaining_s())
        self._write_missing(hashes, deadline)
        # Even if the writes took all of the time, look up what is stored, and post it.
        answer_deadline = Deadline(max(deadline.remaining_s(), self._store.settings.timeout_s))
        pages = self._stored_pages(hashes, deadline, answer_deadline)
        posted = self._post(request_id, hashes, pages, deadline)
        least = min(pages.values()) if posted else 0
        outcome = "published" if least == len(hashes) else "published_in_part"
        self._counters.add(outcome if posted else "unpublished")
        return least

    def _write_missing(self, hashes: Sequence[str], deadline: Deadline) -> None:
        """Write the pages that L2 has and storage lacks, for example because a write was dropped.

        Optional pools are written after the required ones, as in the controller's own writes, and
        only for pages whose required pools are in storage.
        """
        required = self._controller.cache.pool_set.required
        missing = self._missing(hashes, deadline)
        lacking = [bits & required for bits in missing]
        if any(lacking):
            written = self._write(hashes, lacking, deadline)
            lacking = [bits & ~ok for bits, ok in zip(lacking, written, strict=True)]
        optional = [
            0 if left else bits & ~required for left, bits in zip(lacking, missing, strict=True)
        ]
        if any(optional):
            self._write(hashes, optional, deadline)

    def _write(
        self, hashes: Sequence[str], pools: Sequence[PoolBits], deadline: Deadline
    ) -> list[PoolBits]:
        """Write each page in its `pools`. Return the pools that storage accepted."""
        cache = self._controller.cache
        if deadline.passed():
            return [0] * len(hashes)
        entries = cache.pin(hashes)
        pinned = [entry for entry in entries if entry is not None]
        batch = TransferBatch(cache.pool_set)
        for entry, bits in zip(entries, pools, strict=True):
            if entry is None:
                batch.add("", [], 0)
            else:
                batch.add(entry.page_hash, entry.slots, entry.filled & bits)
        try:
            outcome = self._store.save(batch.transfers(), timeout_s=deadline.remaining_s())
        finally:
            cache.unpin(pinned)
        written = batch.succeeded(outcome)
        self._counters.add("written_pages", sum(map(int.bit_count, written)))
        return written

    def _missing(self, hashes: Sequence[str], deadline: Deadline) -> list[PoolBits]:
        """Return, for each page, the pools that this rank writes, the prefix needs and storage lacks.

        A pool that storage could not look up is left out, because storage would not take its pages
        either.
        """
        pool_set = self._controller.cache.pool_set
        missing = [0] * len(hashes)
        for number in pool_numbers(pool_set.written):
            parts = [
                match.present[0]
                for stored in pool_set.pools[number].stored
                if (match := self._match(hashes, stored, deadline, deadline, past_gaps=True))
            ]
            if len(parts) < len(pool_set.pools[number].stored):
                continue
            for page, present in enumerate(zip(*parts, strict=True)):
                if not all(present):
                    missing[page] |= 1 << number & pool_set.needed(page, len(hashes))
        return missing

    def _stored_pages(
        self, hashes: Sequence[str], deadline: Deadline, answer_deadline: Deadline
    ) -> dict[KeySpace, int]:
        """Return how many leading pages a reader would find, for each shard that this rank writes.

        A shard that storage could not look up is left out.
        """
        shards = [stored for pool in self._pools for stored in pool.stored]
        return {
            stored.space: match.pages
            for stored in shards
            if (match := self._match(hashes, stored, deadline, answer_deadline)) is not None
        }

    def _match(
        self,
        hashes: Sequence[str],
        stored: PoolSpec,
        deadline: Deadline,
        answer_deadline: Deadline,
        *,
        past_gaps: bool = False,
    ) -> Match | None:
        """Look up pages. Retry after failures until the deadline. Return None if all lookups failed.

        The last lookup may take until `answer_deadline`.
        """
        while True:
            left_s = min(answer_deadline.remaining_s(), self._store.settings.timeout_s)
            match = self._store.match(hashes, [stored], past_gaps=past_gaps, timeout_s=left_s)
            if match.failures[0] is None:
                return match
            if deadline.passed():
                return None
            time.sleep(min(_RETRY_S, deadline.remaining_s()))

    def _post(
        self,
        request_id: str,
        hashes: Sequence[str],
        pages: Mapping[KeySpace, int],
        deadline: Deadline,
    ) -> bool:
        """Post a completion for each shard until time is up. Return True if all are stored."""
        now_s = time.time()
        left = {
            completion_hash(request_id, space, hashes): Completion.of(
                request_id, space, hashes, count, now_s
            )
            for space, count in pages.items()
        }
        unknown = sum(len(pool.stored) for pool in self._pools) - len(pages)
        while left:
            refused = self._completions.post(left)
            left = {key: left[key] for key in refused}
            if deadline.passed():
                break
            if left:
                time.sleep(min(_RETRY_S, deadline.remaining_s()))
        if left or unknown:
            logger.warning(
                "request %s: %d of %d completions could not be posted, so its decode side will"
                " time out",
                shown_id(request_id),
                len(left) + unknown,
                len(pages) + unknown,
            )
        return not (left or unknown)


def _log_failure(request_id: str, published: Future[int]) -> None:
    """Log an error of `publish`, because the caller may ignore the future that it returned."""
    if not published.cancelled() and (error := published.exception()):
        logger.error(
            "request %s was not published: %s", shown_id(request_id), error, exc_info=error
        )
