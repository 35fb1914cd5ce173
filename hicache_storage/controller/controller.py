"""Between L2 and L3: prefetch before a request runs, writeback after it has."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Self

from hicache_storage.controller.host_cache import HostCache
from hicache_storage.controller.lease import Reservation
from hicache_storage.controller.policies import ControllerSettings, WritePolicy
from hicache_storage.controller.prefetch import Prefetch, Prefetcher
from hicache_storage.controller.writeback import Writeback
from hicache_storage.counters import Counters
from hicache_storage.errors import HiCacheError, StorageClosed
from hicache_storage.keys import check_page_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.host_cache import Entry
    from hicache_storage.controller.pools import CachePool
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)


class CacheController:
    """The cache of one engine: L2 in host pools, L3 in a page store, and the traffic between them.

    All pools of a page (target, draft) are allocated, loaded, written and evicted together, by one code
    path over the list of pools. Thread-safe. A failing store costs hits, never a request: no method
    raises or waits because of it, beyond what the prefetch policy allows.

    The host pools and the page store belong to the caller, and outlive the controller.
    """

    def __init__(
        self,
        store: PageStore,
        pools: Sequence[CachePool],
        settings: ControllerSettings | None = None,
    ) -> None:
        """Open the pools' key spaces.

        Raises:
            ValueError: No pool, or pools that do not go together.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        _check_pools(pools)
        self.settings = settings or ControllerSettings()
        self._store = store
        self._counters = Counters()
        writes_back = self.settings.write_policy is WritePolicy.WRITE_BACK
        self.cache = HostCache(pools, write_back=self._offer if writes_back else None)
        self._writeback = Writeback(store, self.cache, self.settings, self._counters)
        self._prefetcher = Prefetcher(
            store, self.cache, self._writeback, self.settings, self._counters
        )
        self._waiting: queue.SimpleQueue[Prefetch | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"hicache-prefetch-{number}", daemon=True)
            for number in range(self.settings.prefetch_threads)
        ]
        self._closed = False
        for pool in pools:
            store.open_space(pool.space)
        self._buffers = [buffer for pool in pools for buffer in pool.host.buffers]

    def start(self) -> None:
        """Register the host pools with the store and start the threads."""
        for buffer in self._buffers:
            self._store.register_buffer(buffer)
        for thread in self._threads:
            thread.start()
        self._writeback.start()

    def prefetch(self, request_id: str, hashes: Sequence[str]) -> Prefetch:
        """Begin to bring the prefix `hashes` into L2; returns at once.

        Raises:
            ValueError: A malformed page hash.
            StorageClosed: The controller was closed.
        """
        if self._closed:
            raise StorageClosed("this controller was closed: make a new one")
        check_page_hashes(hashes)
        patience_s = self.settings.patience_s(len(hashes), self.cache.pools[0].space.page_tokens)
        prefetch = Prefetch(
            request_id, hashes, cache=self.cache, counters=self._counters, patience_s=patience_s
        )
        self._prefetcher.extend_from_l2(prefetch)
        if prefetch.arrived_pages == len(hashes):
            prefetch.finish()
        else:
            self._waiting.put(prefetch)
        if self._closed:  # closed meanwhile: its thread may be gone
            prefetch.finish()
        return prefetch

    def reserve(self, hashes: Sequence[str], *, timeout_s: float = 0.0) -> Reservation:
        """Slots in all pools for new pages, for as many leading `hashes` as there is room.

        With `timeout_s` it waits that long for room, so that pages on their way to L3 can get there.

        Raises:
            ValueError: A malformed page hash.
        """
        check_page_hashes(hashes)
        groups = self.cache.allocate(len(hashes), timeout_s=timeout_s)
        return Reservation(self.cache, list(hashes[: len(groups)]), groups)

    def commit(self, reservation: Reservation) -> None:
        """The reserved pages are filled in every pool: they are L2's now, and L3's by write policy.

        Raises:
            ValueError: It was committed or abandoned before.
        """
        if not reservation.close():
            raise ValueError("this reservation was committed or abandoned before")
        entries = [
            self.cache.insert(page_hash, slots, stored=False)
            for page_hash, slots in zip(reservation.hashes, reservation.groups, strict=True)
        ]
        self._counters.add("committed_pages", len(entries))
        self._writeback.consider(entries)
        self.cache.unpin(entries)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until the write queue is empty; False where that took longer than `timeout_s`."""
        return self._writeback.drain(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters since the start, in pages unless their names say otherwise."""
        return {
            **self._counters.snapshot(),
            "cached_pages": len(self.cache),
            "evicted_pages": self.cache.evicted_pages,
        }

    def close(self, *, drain: bool = True, timeout_s: float = 10.0) -> bool:
        """Stop. With `drain`, pages that are to be written are written first. Idempotent.

        False where something still runs after `timeout_s`: a store that hangs. Its pages stay pinned.
        """
        if self._closed:
            return True
        self._closed = True
        deadline_s = time.monotonic() + timeout_s
        for _ in self._threads:
            self._waiting.put(None)
        if drain:
            if self.settings.write_policy is WritePolicy.WRITE_BACK:
                self._writeback.offer(self.cache.unwritten())
            self._writeback.drain(timeout_s)
        stopped = self._writeback.close(max(0.1, deadline_s - time.monotonic()))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.1, deadline_s - time.monotonic()))
                stopped &= not thread.is_alive()
        self._finish_waiting()
        if stopped:
            self._unregister()
        else:
            logger.warning("storage calls still run %.0f s after the controller closed", timeout_s)
        return stopped

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (prefetch := self._waiting.get()) is not None:
            try:
                self._prefetcher.run(prefetch)
            except Exception:
                logger.exception("the prefetch of request %r failed", prefetch.request_id)
                self._counters.add("internal_errors")

    def _offer(self, entries: list[Entry]) -> None:
        self._writeback.offer(entries)

    def _finish_waiting(self) -> None:
        """Nobody will serve these any more: let those who wait for them go on."""
        while True:
            try:
                prefetch = self._waiting.get_nowait()
            except queue.Empty:
                return
            if prefetch is not None:
                prefetch.finish()

    def _unregister(self) -> None:
        for buffer in self._buffers:
            try:
                self._store.unregister_buffer(buffer)
            except HiCacheError as error:
                logger.warning("a host pool could not be unregistered: %s", error)


def _check_pools(pools: Sequence[CachePool]) -> None:
    if not pools:
        raise ValueError("a cache needs at least one pool")
    if len({pool.space.id for pool in pools}) != len(pools):
        raise ValueError("two pools have the same key space: give each its own pool name")
    if len({pool.space.page_tokens for pool in pools}) != 1:
        raise ValueError("all pools of a cache have the same page_tokens")
