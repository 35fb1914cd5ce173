"""Clients whose master was gone at their end: each is closed when the master is back.

To close one stops the interpreter, for as long as the master does not answer. Left open for good, it
would join the master that comes back, and lend it memory that nobody wants to lend any more.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

from hicache_backends.mooncake.master import Life, sign_of_life

if TYPE_CHECKING:
    from hicache_backends.mooncake.settings import MooncakeSettings

_POLL_S = 0.5
_ANSWER_LIMIT_S = 1.0


class _Orphans:
    """They have one thread, as long as there are some. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, MooncakeSettings]] = []

    def take(self, native: Any, settings: MooncakeSettings) -> None:
        """Close `native`, which nobody calls any more, when its master answers."""
        count_reference(native, 1)
        with self._lock:
            self._waiting.append((native, settings))
            if len(self._waiting) > 1:
                return
        threading.Thread(target=self._watch, name="hicache-mooncake-orphans", daemon=True).start()

    def has_any(self) -> bool:
        """Return True where a client waits for its master."""
        return bool(self._waiting)

    def forget(self) -> None:
        """In a forked child: the clients are the parent's. They keep their references."""
        self._lock = threading.Lock()
        self._waiting = []

    def _watch(self) -> None:
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                waiting = list(self._waiting)
            for one in waiting:
                native, settings = one
                if sign_of_life(settings, _ANSWER_LIMIT_S) is Life.ANSWERS:
                    native.close()
                    count_reference(native, -1)
                    with self._lock:
                        self._waiting.remove(one)
            with self._lock:
                if not self._waiting:
                    return


def count_reference(native: Any, more: int) -> None:
    """Let the interpreter end without destroying it, which takes twenty seconds without a master."""
    count = ctypes.pythonapi.Py_IncRef if more > 0 else ctypes.pythonapi.Py_DecRef
    count(ctypes.py_object(native))


DEFERRED_CLOSES = _Orphans()
