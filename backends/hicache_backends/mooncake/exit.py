"""The end of the interpreter, and of forked children, while native code is at work.

A native call that returns after the interpreter has ended aborts the process. The library's own end
waits for such calls, half a minute each; in a forked child it would also take the parent's memory from
the cluster. Such a process ends after Python's end and before the library's, with its own exit status.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from typing import Protocol

from hicache_backends.mooncake.deferred_closes import DEFERRED_CLOSES, count_reference
from hicache_backends.mooncake.master import forget_names
from hicache_storage.errors import StorageUnavailable

_WAIT_S = 2.0
_POLL_S = 0.02
_libc = ctypes.CDLL(None)


class Guarded(Protocol):
    """A native client, as far as its end is concerned."""

    pid: int

    def is_busy(self) -> bool: ...
    def close(self) -> None: ...
    def native(self) -> object: ...


_clients: weakref.WeakSet[Guarded] = weakref.WeakSet()


class _Library:
    """What the library can no longer do here: its threads are not there after a fork."""

    was_used = False
    was_forked = False


def must_be_usable() -> None:
    """Refuse a process in which the library would hang.

    Raises:
        StorageUnavailable: It was forked from one that had used the library.
    """
    if _Library.was_forked:
        raise StorageUnavailable(
            "mooncake: this process was forked from one that uses the client library, whose threads a"
            " fork leaves behind: start it with spawn"
        )
    _Library.was_used = True


def guard(client: Guarded) -> None:
    """Have the process end in time and in order, whatever `client` does then."""
    _clients.add(client)


def _at_exit() -> None:
    own = [client for client in _clients if client.pid == os.getpid()]
    for client in own:
        client.close()  # returns in time; a client that was closed already is not closed again
    until_s = time.monotonic() + _WAIT_S
    while any(client.is_busy() for client in own) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    if DEFERRED_CLOSES.has_any() or any(client.is_busy() for client in own):
        _end_without_the_library()


def _in_child() -> None:
    DEFERRED_CLOSES.forget()
    forget_names()
    for client in _clients:
        count_reference(client.native(), 1)
    if _Library.was_used:
        _Library.was_forked = True
        _end_without_the_library()


def _end_without_the_library() -> None:
    """Have the C library end the process at the start of its `exit`, with the status it was given."""
    _libc.on_exit(ctypes.cast(_libc["_exit"], ctypes.c_void_p), None)


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)
