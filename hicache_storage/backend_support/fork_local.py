"""Resources that belong to one process. A forked child makes its own, and leaves its parent's alone."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)


class _HasAfterFork(Protocol):
    def after_fork(self) -> None: ...


def reset_in_children(one: _HasAfterFork) -> None:
    """Call `one.after_fork` in each child right after its fork. Keep no reference to `one`."""
    _OPEN.add(one)


class ForkLocal(Generic[T]):
    """A value that only the process that made it may use: connections, locks, threads. Thread-safe.

    The constructor calls `make`. In each forked child the first `get` calls `make` again, and raises
    its errors. Right after a fork the child calls `abandon` once with the value that the parent still
    uses, even if the child never uses it, so that nothing of the parent stays open there. `abandon`
    must take no lock, because the thread that held a lock at the fork does not exist in the child. An
    abandoned value is never collected, because a finalizer in a client library might end what the
    parent uses.
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
        reset_in_children(self)

    def get(self) -> T:
        """Return this process's value."""
        if self._owner != os.getpid():
            with self._lock():
                if self._owner != os.getpid():
                    self._abandon_value()
                    self._value = self._make()
                    self._owner = os.getpid()
        return self._value

    def renew(self) -> None:
        """Close this process's value, and make a new one, for example with new credentials."""
        with self._lock():
            self._close_value()
            self._value = self._make()
            self._owner = os.getpid()

    def close(self) -> None:
        """Close this process's value. If it has made none, abandon the parent's."""
        with self._lock():
            self._close_value()

    def after_fork(self) -> None:
        """Abandon the parent's value in a child that was just forked. The child has no other thread."""
        self._locks = {}
        self._abandon_value()

    # --- parts -----------------------------------------------------------------------------------

    def _lock(self) -> threading.Lock:
        """Return a lock of this process. A lock of the parent may be held forever."""
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _close_value(self) -> None:
        if self._owner == os.getpid():
            self._close(self._value)
        else:
            self._abandon_value()

    def _abandon_value(self) -> None:
        if self._owner != _NO_PROCESS:
            self._owner = _NO_PROCESS  # a descendant may get the process id of its ancestor
            _ABANDONED.append(self._value)
            self._abandon(self._value)


_NO_PROCESS = 0
_ABANDONED: list[object] = []
"""Values of this process's ancestors. The list keeps them alive until the process ends."""
_OPEN: weakref.WeakSet[_HasAfterFork] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_OPEN):
        try:
            one.after_fork()
        except Exception:
            logger.exception("a forked child could not abandon a resource of its parent")


os.register_at_fork(after_in_child=_after_fork)
