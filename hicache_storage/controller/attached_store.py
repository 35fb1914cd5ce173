"""A page store while it is attached to a controller, from `attach` to `detach`."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_storage.backend_support.byte_limit import ByteLimit
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.controller.writeback import Writeback
from hicache_storage.controller_settings import MIN_END_WAIT_S
from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.sketch_store import SketchStore

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

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
    """A page store that is attached to a controller, with its write queue and its running calls."""

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
        """Open the key spaces of the pools. No page of L2 counts as stored in the store yet.

        Raises:
            StorageUnavailable, StorageTimeout, UnsupportedOperation: A key space could not be opened.
        """
        deadline = Deadline(store.settings.timeout_s)
        for pool in cache.pools:
            for part in pool.stored:
                deadline.check("opening the key spaces")
                store.open_space(part.space)
        self.store = store
        self.epoch: int = cache.new_epoch()
        self.in_flight: ByteLimit = ByteLimit(settings.inflight_nbytes)
        """The bytes that the store is reading, up to their deadlines."""
        self.writeback: Writeback = Writeback(
            store,
            cache,
            settings,
            counters,
            epoch=self.epoch,
            in_use=self.in_use,
            admission=admission,
            explain_log=explain_log,
        )
        self._sketches: SketchStore | None = None
        if admission is not None and admission.stored_nbytes is not None:
            self._sketches = SketchStore(store, admission, cache.pools[0].stored[0].space)
        self._buffers = [buffer for pool in cache.pools for buffer in pool.host.buffers]
        self._registered: list[HostBuffer] = []
        self._calls = CallGate()
        self._closing = False

    @property
    def closing(self) -> bool:
        """True once `detach` has been called. Nothing more is read from the store then."""
        return self._closing

    def start(self) -> None:
        """Register the host pools with the store, and start the writes.

        Raises:
            HiCacheError: A host pool could not be registered. The others are unregistered then.
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
        """Count the `with` block as a running call of the store. Yield False once `detach` is called."""
        counted = self._calls.begin()
        try:
            yield counted and not self._closing
        finally:
            if counted and self._calls.end():
                self._unregister()

    def detach(self, deadline: Deadline, *, drain: bool, unsaved: Sequence[Entry] = ()) -> bool:
        """Stop reading from the store, and end the write queue.

        With `drain`, first write the queued and the `unsaved` pages. If a call still runs at the
        deadline, the host pools stay registered until it ends; `wait_idle` waits for it. Return False if
        `drain` was set and a page was lost.
        """
        self._closing = True
        written = self.writeback.close(deadline, drain=drain, unsaved=unsaved)
        if self._sketches is not None:
            self._sketches.close(max(MIN_END_WAIT_S, deadline.remaining_s()))
        self.wait_idle(deadline)
        if self._calls.close():
            self._unregister()
        else:
            logger.warning(
                "storage calls have not ended after %.0f s, and nobody waits for them any more",
                deadline.timeout_s,
            )
        return written

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no call runs. Return False if one still runs at the deadline."""
        return self._calls.wait_until_idle(max(MIN_END_WAIT_S, deadline.remaining_s()))

    def _unregister(self) -> None:
        while self._registered:
            try:
                self.store.unregister_buffer(self._registered.pop())
            except HiCacheError as error:
                logger.warning("a host pool could not be unregistered: %s", error)
