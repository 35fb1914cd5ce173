"""The client library: imported once, quiet, and where it cannot be, with a reason that helps."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from hicache_backends.mooncake.signals import signals_kept
from hicache_storage.errors import BackendNotInstalled

_HOME = "hicache_backends.mooncake"
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[.\d]*)")
_CUDA = ("libcuda", "libcudart", "libmlx5", "libnv")


def load() -> Any:
    """The module `mooncake.store`.

    Raises:
        ModuleNotFoundError: The wheel is not there.
        BackendNotInstalled: The wheel is there, and a library of the system that it needs is not.
    """
    # The library reads these once. It tells of every step it takes, and tries to join for 90 seconds.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    try:
        with signals_kept():
            return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        raise  # the registry knows what to install
    except ImportError as error:
        raise BackendNotInstalled(_advice(str(error)), name=_HOME) from error


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
