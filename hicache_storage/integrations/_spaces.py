"""Open key spaces in separate threads before an engine stores pages, and again after a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from hicache_storage.backend_support.executor import DaemonExecutor

if TYPE_CHECKING:
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store import PageStore

logger = logging.getLogger(__name__)

_THREADS = 2
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_MOST_SPACES = 1024
"""A limit, because clients create key spaces through the salts of their requests."""


class SpaceOpener:
    """The key spaces that an engine stores pages in. Thread-safe.

    Two threads open key spaces. `open` waits only for the first attempt, until the caller's deadline.
    After a failure the key space counts as closed until a later attempt succeeds. The first call of
    `open` after a back-off begins the next attempt. The back-off doubles with each failure, up to 30
    seconds. If there are too many key spaces, the least recently used key space is forgotten, and is
    opened again at its next use.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._executor = DaemonExecutor("hicache-open", _THREADS)
        self._open: OrderedDict[KeySpace, None] = OrderedDict()
        self._opening: dict[KeySpace, Future[None]] = {}
        self._failures: dict[KeySpace, tuple[int, float]] = {}
        self.failed = 0
        """The number of attempts that failed."""

    @property
    def count(self) -> int:
        """The number of open key spaces."""
        return len(self._open)

    def begin(self, space: KeySpace) -> Future[None] | None:
        """Begin to open `space`. Return None if it is already open or in a back-off."""
        with self._lock:
            if space in self._open:
                self._open.move_to_end(space)
                return None
            opening = self._opening.get(space)
            if opening is None and time.monotonic() >= self._failures.get(space, (0, 0.0))[1]:
                opening = self._executor.submit(lambda: self._try(space))
                self._opening[space] = opening
            return opening

    def open(self, space: KeySpace, deadline: Deadline) -> bool:
        """Return True if `space` is open. Wait for the first attempt until the deadline."""
        opening = self.begin(space)
        if opening is not None and space not in self._failures:
            wait([opening], deadline.remaining_s())
        return space in self._open

    def close(self) -> None:
        """End the threads, without waiting for the store."""
        self._executor.close(0)

    def _try(self, space: KeySpace) -> None:
        try:
            self._store.open_space(space)
        except BaseException as error:  # noqa: BLE001 - a storage may raise anything
            self._back_off(space, error)
        else:
            with self._lock:
                self._open[space] = None
                if len(self._open) > _MOST_SPACES:
                    self._store.forget_space(self._open.popitem(last=False)[0])
                self._failures.pop(space, None)
                self._opening.pop(space, None)

    def _back_off(self, space: KeySpace, error: BaseException) -> None:
        with self._lock:
            failures = self._failures.get(space, (0, 0.0))[0] + 1
            backoff_s = min(_FIRST_BACKOFF_S * 2 ** min(failures - 1, 16), _MAX_BACKOFF_S)
            self._failures[space] = (failures, time.monotonic() + backoff_s)
            if len(self._failures) > _MOST_SPACES:
                del self._failures[next(iter(self._failures))]
            self._opening.pop(space, None)
            self.failed += 1
        level = logging.WARNING if failures == 1 else logging.DEBUG
        logger.log(
            level,
            "the key space of pool %r could not be opened (%s: %s): its pages count as missing,"
            " and the next attempt is in %.1f s at the earliest",
            space.pool,
            type(error).__name__,
            error,
            backoff_s,
        )
