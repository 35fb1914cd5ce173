"""A store in use: what `attach` begins and `detach` ends."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.controller.limits import InFlight
from hicache_storage.controller.writeback import Writeback
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.host_cache import HostCache
    from hicache_storage.controller.policies import ControllerSettings
    from hicache_storage.counters import Counters
    from hicache_storage.page import HostBuffer
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)


class Tier:
    """L3 for as long as it is there: a page store, its write queue, and who is using it just now."""

    def __init__(
        self,
        store: PageStore,
        cache: HostCache,
        settings: ControllerSettings,
        counters: Counters,
    ) -> None:
        """Open the pools' key spaces; L2 forgets what another store had.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        for pool in cache.pools:
            for part in pool.stored:
                store.open_space(part.space)
        self.store = store
        self.epoch = cache.new_epoch()
        self.in_flight = InFlight(settings.inflight_nbytes)
        self.writeback = Writeback(
            store, cache, settings, counters, epoch=self.epoch, track=self.track
        )
        self._buffers = [buffer for pool in cache.pools for buffer in pool.host.buffers]
        self._registered: list[HostBuffer] = []
        self._uses = 0
        self._closing = self._unregister_later = False
        self._changed = threading.Condition()

    @property
    def closing(self) -> bool:
        """Nothing more should be read: it is being detached."""
        return self._closing

    def start(self) -> None:
        """Register the host pools with the store, and begin to write.

        Raises:
            HiCacheError: From registering them; none is registered then.
        """
        try:
            for buffer in self._buffers:
                self.store.register_buffer(buffer)
                self._registered.append(buffer)
        except BaseException:
            self._unregister()
            raise
        self.writeback.start()

    @contextmanager
    def used(self) -> Generator[bool]:
        """A stretch in which the store is called; False where it must not be any more."""
        with self._changed:
            may = not self._closing
            self._uses += 1
        try:
            yield may
        finally:
            self._leave()

    def track(self, settled: Future[None]) -> None:
        """The store is in use until then: a call that overran may still touch host memory."""
        with self._changed:
            self._uses += 1
        settled.add_done_callback(lambda _: self._leave())

    def end(self, *, owed: Sequence[Entry], drain: bool, timeout_s: float) -> bool:
        """Stop using the store: reads end; with `drain` writes are finished first, `owed` pages too.

        False where a call still runs after `timeout_s`; the host pools stay registered until it returns.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
        self.writeback.offer(owed, bounded=False)
        if drain:
            self.writeback.drain(timeout_s)
        ended = self.writeback.close(max(0.1, deadline_s - time.monotonic()))
        with self._changed:
            left_s = max(0.1, deadline_s - time.monotonic())
            ended &= self._changed.wait_for(lambda: not self._uses, left_s)
            idle = not self._uses
            unregistered, self._unregister_later = idle, not idle
        if unregistered:
            self._unregister()
        else:
            logger.warning("storage calls still run after %.0f s: left behind", timeout_s)
        return ended

    def _leave(self) -> None:
        with self._changed:
            self._uses -= 1
            last = not self._uses and self._unregister_later
            self._unregister_later &= not last
            self._changed.notify_all()
        if last:
            self._unregister()

    def _unregister(self) -> None:
        while self._registered:
            try:
                self.store.unregister_buffer(self._registered.pop())
            except HiCacheError as error:
                logger.warning("a host pool could not be unregistered: %s", error)
