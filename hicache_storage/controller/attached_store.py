"""The store that is attached to a controller, from `attach` to `detach`."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.prefetch_quota import InFlightReads
from hicache_storage.controller.writeback import Writeback
from hicache_storage.controller_settings import MIN_END_WAIT_S
from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.sketch_store import SketchStore

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from concurrent.futures import Future

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller_settings import ControllerSettings
    from hicache_storage.page import HostBuffer
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.admission import Admission
    from hicache_storage.request_log import ExplainLog

logger: logging.Logger = logging.getLogger(__name__)


class AttachedStore:
    """A page store while it is attached, with its write queue and the number of its running calls."""

    def __init__(
        self,
        store: PageStore,
        cache: HostCache,
        settings: ControllerSettings,
        counters: Counters,
        *,
        admission: Admission | None = None,
        explain_log: ExplainLog | None = None,
    ) -> None:
        """Open the pools' key spaces, and mark no page of L2 as stored.

        Raises:
            ValueError: The host pools have headers of another size than the store's.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        _check_headers(store, cache)
        deadline = Deadline(store.settings.timeout_s)
        for pool in cache.pools:
            for part in pool.stored:
                deadline.check("opening the key spaces")
                store.open_space(part.space)
        self.store = store
        self.epoch: int = cache.new_epoch()
        self.in_flight: InFlightReads = InFlightReads(settings.inflight_nbytes)
        self.writeback: Writeback = Writeback(
            store,
            cache,
            settings,
            counters,
            epoch=self.epoch,
            in_use=self.in_use,
            track_call=self.track_call,
            admission=admission,
            explain_log=explain_log,
        )
        self._sketches: SketchStore | None = None
        if admission is not None and admission.stored_nbytes is not None:
            self._sketches = SketchStore(store, admission, cache.pools[0].stored[0].space)
        self._buffers = [buffer for pool in cache.pools for buffer in pool.host.buffers]
        self._registered: list[HostBuffer] = []
        self._calls = 0
        self._closing = self._unregister_later = False
        self._changed = threading.Condition()

    @property
    def closing(self) -> bool:
        """True once the store is being detached: nothing more is read."""
        return self._closing

    def start(self) -> None:
        """Register the host pools with the store, and start the writes.

        Raises:
            HiCacheError: From registering the host pools; none is registered then.
        """
        try:
            for buffer in self._buffers:
                self.store.register_buffer(buffer)
                self._registered.append(buffer)
        except BaseException:
            self._unregister()
            raise
        self.writeback.start()
        if self._sketches is not None:
            self._sketches.start()

    @contextmanager
    def in_use(self) -> Generator[bool]:
        """Count calls of the store in the `with` block; yield False where none may be made any more."""
        with self._changed:
            allowed = not self._closing
            self._calls += 1
        try:
            yield allowed
        finally:
            self._end_call()

    def track_call(self, settled: Future[None]) -> None:
        """Count a call until `settled`: a call that overran its timeout may still touch host memory."""
        with self._changed:
            self._calls += 1
        settled.add_done_callback(lambda _: self._end_call())

    def detach(self, deadline: Deadline, *, drain: bool, unsaved: Sequence[Entry] = ()) -> bool:
        """Stop reads; with `drain`, write the queued and the `unsaved` pages first.

        The host pools stay registered while a call still runs at the deadline; `wait_idle` waits for it.
        Return False where `drain` has lost a page that was queued.
        """
        with self._changed:
            self._closing = True
        written = self.writeback.close(deadline, drain=drain, unsaved=unsaved)
        if self._sketches is not None:
            self._sketches.close(max(MIN_END_WAIT_S, deadline.remaining_s()))
        self.wait_idle(deadline)
        with self._changed:
            idle, self._unregister_later = not self._calls, bool(self._calls)
        if idle:
            self._unregister()
        else:
            logger.warning("storage calls still run after %.0f s: left behind", deadline.timeout_s)
        return written

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no call runs; return False where one still runs at the deadline."""
        with self._changed:
            left_s = max(MIN_END_WAIT_S, deadline.remaining_s())
            return self._changed.wait_for(lambda: not self._calls, left_s)

    def _end_call(self) -> None:
        with self._changed:
            self._calls -= 1
            last = not self._calls and self._unregister_later
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
