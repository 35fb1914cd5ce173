"""Remember which key spaces are open in a storage, and open those that are written to."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

logger: logging.Logger = logging.getLogger("hicache_storage.page_store")

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_MOST_SPACES = 4096
"""A limit, because clients create key spaces by their tenants and the salts of their requests."""


class OpenSpaces:
    """The key spaces that one process used last. Thread-safe.

    After a failure a key space counts as closed until a later attempt succeeds. The next attempt is the
    first write after a back-off, which doubles with each failure, up to 30 seconds.
    """

    def __init__(self, storage: HiCacheStorage) -> None:
        self.storage: HiCacheStorage = storage
        self._lock = threading.Lock()
        self._open: OrderedDict[KeySpace, None] = OrderedDict()
        self._failures: OrderedDict[KeySpace, tuple[int, float]] = OrderedDict()
        self.failed: int = 0
        """How often a write could not open its key space."""

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, framed: KeySpace) -> bool:
        return framed in self._open

    def open(self, framed: KeySpace) -> None:
        """Open a key space, whether it is open or not. Raises the storage's own error."""
        self.storage.open_space(framed)
        with self._lock:
            self._open[framed] = None
            self._failures.pop(framed, None)
            if len(self._open) > _MOST_SPACES:
                self._open.popitem(last=False)

    def ensure(self, framed: KeySpace) -> bool:
        """Open a key space unless it is open. Return False if it can't be opened now."""
        with self._lock:
            if framed in self._open:
                self._open.move_to_end(framed)
                return True
        if time.monotonic() < self._failures.get(framed, (0, 0.0))[1]:
            return False
        try:
            self.open(framed)
        except BaseException as error:  # noqa: BLE001 - a storage may raise anything
            self._back_off(framed, error)
            return False
        return True

    def _back_off(self, framed: KeySpace, error: BaseException) -> None:
        with self._lock:
            failures = self._failures.get(framed, (0, 0.0))[0] + 1
            backoff_s = min(_FIRST_BACKOFF_S * 2 ** min(failures - 1, 16), _MAX_BACKOFF_S)
            self._failures[framed] = (failures, time.monotonic() + backoff_s)
            if len(self._failures) > _MOST_SPACES:
                self._failures.popitem(last=False)
            self.failed += 1
        level = logging.WARNING if failures == 1 else logging.DEBUG
        logger.log(
            level,
            "the key space of pool %r could not be opened (%s: %s): its pages are not stored, and the"
            " next attempt is in %.1f s at the earliest",
            framed.pool,
            type(error).__name__,
            error,
            backoff_s,
        )
