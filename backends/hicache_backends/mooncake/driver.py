"""Import the client library: quietly, without its signal handlers, and with advice if it fails.

The client library contains a part in Go, for etcd. Go's runtime installs handlers for SIGSEGV,
SIGBUS, SIGFPE and SIGURG in every process that loads it. We restore the process's own handlers
after the import. Go works without its handlers: its threads are preempted at fewer points, and a
fault in Go code kills the process with that signal.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import BackendNotInstalled

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_PACKAGE = "hicache_backends.mooncake"
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[.\d]*)")
_CUDA = ("libcuda", "libcudart", "libmlx5", "libnv")
_NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
_LDD_TIMEOUT_S = 10.0
_GO_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGURG)
_GO_LIBRARY = "libetcd_wrapper"
_ACTION_NBYTES = 256
"""No platform's `struct sigaction` is larger than this."""
_GO_START_LIMIT_S = 1.0
"""The longest wait for Go's runtime, which starts on its own thread after about a millisecond."""


def load() -> Any:
    """Import and return the module `mooncake.store`.

    Raises:
        ModuleNotFoundError: The wheel is not installed.
        BackendNotInstalled: The wheel is installed, but a system library that it needs is not.
    """
    # The library reads these variables once. By default it logs every step and tries 90 s to join.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    try:
        with signal_handlers_kept():
            return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise  # the registry adds what to install
    except ImportError as error:
        missing = _LIBRARY.findall(str(error)) or [str(error)]
        advice = _advice(list(dict.fromkeys([*missing, *_missing_libraries()])))
        raise BackendNotInstalled(advice, name=_PACKAGE) from error


def _missing_libraries() -> list[str]:
    """Return all libraries that the wheel lacks. The loader itself stops at the first one."""
    try:
        wheel = importlib.util.find_spec("mooncake.store")
        if wheel is None or wheel.origin is None:
            return []
        told = subprocess.run(  # noqa: S603 - it names the libraries of an installed wheel
            ["ldd", wheel.origin],  # noqa: S607
            check=False,
            capture_output=True,
            text=True,
            timeout=_LDD_TIMEOUT_S,
        )
    except (ImportError, OSError, subprocess.TimeoutExpired):
        return []
    return _NOT_FOUND.findall(told.stdout)


def _advice(missing: Sequence[str]) -> str:
    """Return what to do about the missing libraries."""
    of_gpu = [library for library in missing if library.startswith(_CUDA)]
    of_system = [library for library in missing if library not in of_gpu]
    parts: list[str] = []
    if of_system:
        packages = "libibverbs1 libnuma1 libcurl4"
        parts.append(f"{', '.join(of_system)} (Debian and Ubuntu: apt install {packages})")
    if of_gpu:
        instead = "the wheel mooncake-transfer-engine-non-cuda instead of mooncake-transfer-engine"
        parts.append(f"{', '.join(of_gpu)} of the GPU's driver (install it, or {instead})")
    return (
        "backend 'mooncake': the wheel is installed, but these libraries are"
        f" missing: {'; '.join(parts)}"
    )


@contextmanager
def signal_handlers_kept() -> Generator[None, None, None]:
    """Restore the process's signal handlers after an import that starts Go's runtime."""
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
    """Wait until Go has installed its handler for SIGURG, which is the last one."""
    now = ctypes.create_string_buffer(_ACTION_NBYTES)
    until_s = time.monotonic() + _GO_START_LIMIT_S
    while time.monotonic() < until_s:
        libc.sigaction(int(signal.SIGURG), None, now)
        if now.raw != before.raw:
            return
        time.sleep(0.001)
