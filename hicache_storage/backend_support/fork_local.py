"""What one process has open: a forked child makes its own, and leaves its parent's alone."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)


class ForkLocal(Generic[T]):
    """Connections, locks, threads: what only the process that made it may use. Thread-safe.

    `make` is called at once, and in each forked child by the first `get`; what it raises, they raise.
    `abandon` is called in the child, once, as soon as it was forked, with what the parent still uses: it
    lets go of the child's copy without a lock, since a thread that held one when the process was forked
    is not there. A child that never uses it keeps nothing of its parent's alive either. What was
    abandoned is never collected: a finalizer of a client library might end what the parent uses.
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        close: Callable[[T], None],
        abandon: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._make, self._close, self._abandon = make, close, abandon
        self._locks: dict[int, threading.Lock] = {}
        self._owner = os.getpid()
        self._value = make()
        _OPEN.add(self)

    def get(self) -> T:
        """This process's own."""
        if self._owner != os.getpid():
            with self._lock():
                if self._owner != os.getpid():
                    self._leave()
                    self._value = self._make()
                    self._owner = os.getpid()
        return self._value

    def renew(self) -> None:
        """Close this process's, and make another: what it was made from has changed."""
        with self._lock():
            self._end()
            self._value = self._make()
            self._owner = os.getpid()

    def close(self) -> None:
        """Close this process's, or let go of its parent's if it has made none."""
        with self._lock():
            self._end()

    def forked(self) -> None:
        """What a child does at once. No other thread is there, and no lock may be taken."""
        self._locks = {}
        self._leave()

    # --- parts -----------------------------------------------------------------------------------

    def _lock(self) -> threading.Lock:
        """A lock of this process: one of the parent's may be held for ever."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _end(self) -> None:
        if self._owner == os.getpid():
            self._close(self._value)
        else:
            self._leave()

    def _leave(self) -> None:
        if self._owner != _NOBODY:
            self._owner = _NOBODY  # of all descendants: one may be given the number of its ancestor
            _ABANDONED.append(self._value)
            self._abandon(self._value)


_NOBODY = 0
_ABANDONED: list[object] = []
"""What ancestors of this process use, or used. It outlives whatever held it here."""
_OPEN: weakref.WeakSet[ForkLocal[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_OPEN):
        try:
            one.forked()
        except Exception:
            logger.exception("a forked child could not let go of its parent's")


os.register_at_fork(after_in_child=_after_fork)
