"""A store in use: what `attach` begins and `detach` ends."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.admission import InFlight
from hicache_storage.controller.writeback import Writeback
from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.settings import ControllerSettings
    from hicache_storage.page import HostBuffer
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

# A call that is about to return needs a moment, also where all the time went into writing.
_TO_END_S = 0.1


class AttachedStore:
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
            ValueError: Host pools with headers of another size than the store's.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        _check_headers(store, cache)
        deadline = Deadline(store.settings.timeout_s)
        for pool in cache.pools:
            for part in pool.stored:
                deadline.check("opening the key spaces")
                store.open_space(part.space)
        self.store = store
        self.epoch = cache.new_epoch()
        self.in_flight = InFlight(settings.inflight_nbytes)
        self.writeback = Writeback(
            store,
            cache,
            settings,
            counters,
            epoch=self.epoch,
            used=self.used,
            track=self.track,
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

    def end(self, deadline: Deadline, *, drain: bool, owed: Sequence[Entry] = ()) -> bool:
        """Stop using the store: reads end; with `drain`, what is queued and `owed` is written first.

        False where `drain` has lost a page that was queued. While a call still runs at the deadline the
        host pools stay registered; `ended` tells.
        """
        with self._changed:
            self._closing = True
        written = self.writeback.close(deadline, drain=drain, owed=owed)
        self.ended(deadline)
        with self._changed:
            unregistered, self._unregister_later = not self._uses, bool(self._uses)
        if unregistered:
            self._unregister()
        else:
            logger.warning("storage calls still run after %.0f s: left behind", deadline.timeout_s)
        return written

    def ended(self, deadline: Deadline) -> bool:
        """Wait until no call runs any more; False where one still does at the deadline."""
        with self._changed:
            left_s = max(_TO_END_S, deadline.remaining_s())
            return self._changed.wait_for(lambda: not self._uses, left_s)

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


def _check_headers(store: PageStore, cache: HostCache) -> None:
    for pool in cache.pools:
        if pool.host.frame_nbytes != store.frame_nbytes:
            raise ValueError(
                f"pool {pool.space.pool!r}: the host pool has headers of {pool.host.frame_nbytes} bytes,"
                f" and this store needs {store.frame_nbytes}: open it with frame_nbytes="
                f"{store.frame_nbytes}, or use a store of the same alignment"
            )
