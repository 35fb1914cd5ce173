"""The import of the client library: quiet, without its signal handlers, with advice where it fails.

The client library contains a part in Go, for etcd. Go's runtime catches SIGSEGV, SIGBUS, SIGFPE and
SIGURG in any process that loads it. The process's own handlers are restored after the import. Go
works without its handlers: its threads are then preempted at fewer points, and a fault in Go code
kills the process by the signal.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import BackendNotInstalled

if TYPE_CHECKING:
    from collections.abc import Generator

_PACKAGE = "hicache_backends.mooncake"
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[.\d]*)")
_CUDA = ("libcuda", "libcudart", "libmlx5", "libnv")
_GO_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGURG)
_GO_LIBRARY = "libetcd_wrapper"
_ACTION_NBYTES = 256
"""A size that no platform's `struct sigaction` exceeds."""
_GO_START_LIMIT_S = 1.0
"""Go's runtime starts on a thread of its own, in about a millisecond after the library was loaded."""


def load() -> Any:
    """Return the module `mooncake.store`.

    Raises:
        ModuleNotFoundError: The wheel is not installed.
        BackendNotInstalled: The wheel is installed, and a library of the system that it needs is not.
    """
    # The library reads these variables once. By default it logs every step and tries to join for 90 s.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    try:
        with signal_handlers_kept():
            return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise  # the registry adds what to install
    except ImportError as error:
        raise BackendNotInstalled(_advice(str(error)), name=_PACKAGE) from error


def _advice(text: str) -> str:
    found = _LIBRARY.search(text)
    library = found[1] if found else text
    if library.startswith(_CUDA):
        return (
            f"backend 'mooncake': {library} of the GPU's driver is missing, which the wheel"
            " mooncake-transfer-engine needs: install the driver, or the wheel"
            " mooncake-transfer-engine-non-cuda in its place"
        )
    return (
        f"backend 'mooncake': the wheel is here, but the system library {library} is missing"
        " (Debian and Ubuntu: apt install libibverbs1 libnuma1 libcurl4)"
    )


@contextmanager
def signal_handlers_kept() -> Generator[None, None, None]:
    """Restore the process's signal handlers after an import of Go's runtime."""
    libc = ctypes.CDLL(None)
    before = {number: ctypes.create_string_buffer(_ACTION_NBYTES) for number in _GO_SIGNALS}
    for number, action in before.items():
        libc.sigaction(int(number), None, action)
    was_loaded = _is_go_loaded()
    try:
        yield
    finally:
        if not was_loaded and _is_go_loaded():
            _await_go_handlers(libc, before[signal.SIGURG])
            for number, action in before.items():
                libc.sigaction(int(number), action, None)


def _is_go_loaded() -> bool:
    try:
        return _GO_LIBRARY in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _await_go_handlers(libc: ctypes.CDLL, before: ctypes.Array[ctypes.c_char]) -> None:
    """Wait for Go's handler of SIGURG, which Go installs last."""
    now = ctypes.create_string_buffer(_ACTION_NBYTES)
    until_s = time.monotonic() + _GO_START_LIMIT_S
    while time.monotonic() < until_s:
        libc.sigaction(int(signal.SIGURG), None, now)
        if now.raw != before.raw:
            return
        time.sleep(0.001)
