"""Signal handlers that a library installs when it is loaded, taken back.

The client library brings a part in Go, for etcd, whose runtime catches SIGSEGV, SIGBUS, SIGFPE and
SIGURG in any process that loads it. Go does without: its threads are then preempted where they let
themselves be, and where its code fails, the process dies of the signal.
"""

from __future__ import annotations

import ctypes
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_TAKEN = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGURG)
_GO_LIBRARY = "libetcd_wrapper"
_ACTION_NBYTES = 256
"""More than a `struct sigaction` has anywhere."""
_START_LIMIT_S = 1.0
"""Go's runtime starts on a thread of its own, after the library was loaded; it takes a millisecond."""


@contextmanager
def signals_kept() -> Generator[None, None, None]:
    """What is loaded within leaves the process's handlers as they are."""
    libc = ctypes.CDLL(None)
    before = {number: ctypes.create_string_buffer(_ACTION_NBYTES) for number in _TAKEN}
    for number, action in before.items():
        libc.sigaction(int(number), None, action)
    was_there = _is_loaded()
    try:
        yield
    finally:
        if not was_there and _is_loaded():
            _await_handlers(libc, before[signal.SIGURG])
            for number, action in before.items():
                libc.sigaction(int(number), action, None)


def _is_loaded() -> bool:
    try:
        return _GO_LIBRARY in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _await_handlers(libc: ctypes.CDLL, before: ctypes.Array[ctypes.c_char]) -> None:
    """Until Go has installed the last of them, by number."""
    now = ctypes.create_string_buffer(_ACTION_NBYTES)
    until_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < until_s:
        libc.sigaction(int(signal.SIGURG), None, now)
        if now.raw != before.raw:
            return
        time.sleep(0.001)
