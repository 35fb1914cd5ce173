"""The conformance kit: it tests a backend against the rules of the storage contract.

    from hicache_conformance import StorageConformance

    class TestAcme(StorageConformance):
        storage_class = AcmeStorage

        def config(self, scratch):
            return {"path": str(scratch.path)}

The names below are imported when they are first used, because pytest loads the plugin in every run
of an environment that has this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_conformance.author import StorageConformance
    from hicache_conformance.run.subject import Scratch, Server
    from hicache_conformance.tools.network.proxy import FaultProxy
    from hicache_conformance.tools.observation.synced_files import SyncedFiles
    from hicache_storage.testing import Fault, FaultyStorage, Odds, Strike

_HOMES = {
    "hicache_conformance.author": ("StorageConformance",),
    "hicache_conformance.run.subject": ("Scratch", "Server"),
    "hicache_conformance.tools.network.proxy": ("FaultProxy",),
    "hicache_conformance.tools.observation.synced_files": ("SyncedFiles",),
    "hicache_storage.testing": ("Fault", "FaultyStorage", "Odds", "Strike"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Fault",
    "FaultProxy",
    "FaultyStorage",
    "Odds",
    "Scratch",
    "Server",
    "StorageConformance",
    "Strike",
    "SyncedFiles",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
