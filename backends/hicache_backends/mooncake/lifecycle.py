"""How native clients end: deferred closes, interpreter exit, and forks.

Closing a client that lends memory stops the interpreter until the master answers. If we never closed
the client of a master that is down, the client would rejoin the master when the master comes back, and
lend memory to it. So such a client is closed later, when its master answers again.

A native call that returns after the interpreter has ended aborts the process. The library's exit
handlers wait for such calls, half a minute each; in a forked child they would also remove the
parent's memory from the cluster. So we end such a process with its own exit status after Python's
exit handlers, but before the library's.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from hicache_backends.mooncake.master import MasterState, probe_master
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from hicache_backends.mooncake.settings import MooncakeSettings

_MASTER_POLL_S = 0.5
_MASTER_ANSWER_S = 1.0
_EXIT_WAIT_S = 2.0
_EXIT_POLL_S = 0.02
_libc = ctypes.CDLL(None)


class DeferredCloses:
    """Clients that are closed as soon as their master answers. One thread waits while there are any.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[Any, MooncakeSettings, Future[None]]] = []

    def add(self, native: Any, settings: MooncakeSettings, ended: Future[None]) -> None:
        """Close `native` when its master answers, and finish `ended` then.

        The caller must not call `native` any more.
        """
        _keep_alive(native)
        with self._lock:
            self._waiting.append((native, settings, ended))
            if len(self._waiting) > 1:
                return
        threading.Thread(target=self._watch, name="hicache-mooncake-closes", daemon=True).start()

    def has_any(self) -> bool:
        """Return True while a client waits for its master."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Drop the parent's clients in a forked child, without destroying them."""
        self._lock = threading.Lock()
        self._waiting = []

    def _watch(self) -> None:
        while True:
            time.sleep(_MASTER_POLL_S)
            with self._lock:
                waiting = list(self._waiting)
            for entry in waiting:
                native, settings, ended = entry
                if probe_master(settings, _MASTER_ANSWER_S) is MasterState.ANSWERS:
                    native.close()
                    ended.set_result(None)
                    ctypes.pythonapi.Py_DecRef(ctypes.py_object(native))
                    with self._lock:
                        self._waiting.remove(entry)
            with self._lock:
                if not self._waiting:
                    return


DEFERRED_CLOSES = DeferredCloses()


class Closable(Protocol):
    """The parts of a client that process exit and forks need."""

    pid: int

    def is_busy(self) -> bool: ...
    def close(self) -> None: ...
    def native(self) -> object: ...


_clients: weakref.WeakSet[Closable] = weakref.WeakSet()


class _Library:
    """The state of the client library in this process. A fork does not copy the library's threads."""

    was_used = False
    was_forked = False


def ensure_library_usable() -> None:
    """Refuse a process in which the library would hang.

    Raises:
        StorageUnavailable: The process was forked from one that had used the library.
    """
    if _Library.was_forked:
        raise StorageUnavailable(
            "mooncake: this process was forked from one that uses the client library, whose threads a"
            " fork leaves behind: start it with spawn"
        )
    _Library.was_used = True


def close_at_exit(client: Closable) -> None:
    """Close `client` when the interpreter exits. End the process even if closing hangs."""
    _clients.add(client)


def _at_exit() -> None:
    own = [client for client in _clients if client.pid == os.getpid()]
    for client in own:
        client.close()  # `close` returns in bounded time, and does nothing the second time
    until_s = time.monotonic() + _EXIT_WAIT_S
    while any(client.is_busy() for client in own) and time.monotonic() < until_s:
        time.sleep(_EXIT_POLL_S)
    if DEFERRED_CLOSES.has_any() or any(client.is_busy() for client in own):
        _skip_library_exit_handlers()


def _in_forked_child() -> None:
    DEFERRED_CLOSES.forget()
    for client in _clients:
        _keep_alive(client.native())
    if _Library.was_used:
        _Library.was_forked = True
        _skip_library_exit_handlers()


def _keep_alive(native: object) -> None:
    """Add a reference, so that the interpreter never destroys `native`.

    If the master is down, the destructor takes twenty seconds.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _skip_library_exit_handlers() -> None:
    """Make `_exit` the first exit handler of the C library. The exit status stays."""
    _libc.on_exit(ctypes.cast(_libc["_exit"], ctypes.c_void_p), None)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
