"""The controller: prefetch and writeback between host memory (L2) and storage (L3).

Each name is imported when it is first used, so that a program that only reads the settings starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.controller import CacheController
    from hicache_storage.controller.explain import Explanation, Reason
    from hicache_storage.controller.lease import Coverage, Lease, Reservation
    from hicache_storage.controller.pools import CachePool
    from hicache_storage.controller.prefetch import Prefetch
    from hicache_storage.controller.ranks import Channel, Ranks, RanksLost, SingleRank
    from hicache_storage.controller.settings import (
        ControllerSettings,
        DropPolicy,
        PartialHits,
        PrefetchPolicy,
        WritePolicy,
    )
    from hicache_storage.controller.torch_consensus import TorchRanks

_MODULES = {
    "cache": ("HostCache",),
    "controller": ("CacheController",),
    "explain": ("Explanation", "Reason"),
    "lease": ("Coverage", "Lease", "Reservation"),
    "pools": ("CachePool",),
    "prefetch": ("Prefetch",),
    "ranks": ("Channel", "Ranks", "RanksLost", "SingleRank"),
    "settings": (
        "ControllerSettings",
        "DropPolicy",
        "PartialHits",
        "PrefetchPolicy",
        "WritePolicy",
    ),
    "torch_consensus": ("TorchRanks",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CacheController",
    "CachePool",
    "Channel",
    "ControllerSettings",
    "Coverage",
    "DropPolicy",
    "Explanation",
    "HostCache",
    "Lease",
    "PartialHits",
    "Prefetch",
    "PrefetchPolicy",
    "Ranks",
    "RanksLost",
    "Reason",
    "Reservation",
    "SingleRank",
    "TorchRanks",
    "WritePolicy",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
