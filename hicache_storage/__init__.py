"""KV-cache storage for LLM servers: one interface, many backends, and a cache that never lies.

What users and backend authors import. Everything is loaded when it is first used, so that importing this
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_storage.errors import (
        BackendNotInstalled,
        ConfigError,
        CorruptPage,
        HiCacheError,
        StorageClosed,
        StorageTimeout,
        StorageUnavailable,
        UnknownBackend,
        UnsupportedOperation,
    )
    from hicache_storage.keys import KeySpace, Shard, namespace_seed, page_hashes
    from hicache_storage.page import Page
    from hicache_storage.registry import open_storage
    from hicache_storage.storage import (
        Capabilities,
        Durability,
        HiCacheStorage,
        PageInfo,
        Retention,
        StorageStats,
    )

_HOMES = {
    "errors": (
        "BackendNotInstalled",
        "ConfigError",
        "CorruptPage",
        "HiCacheError",
        "StorageClosed",
        "StorageTimeout",
        "StorageUnavailable",
        "UnknownBackend",
        "UnsupportedOperation",
    ),
    "keys": ("KeySpace", "Shard", "namespace_seed", "page_hashes"),
    "page": ("Page",),
    "registry": ("open_storage",),
    "storage": (
        "Capabilities",
        "Durability",
        "HiCacheStorage",
        "PageInfo",
        "Retention",
        "StorageStats",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BackendNotInstalled",
    "Capabilities",
    "ConfigError",
    "CorruptPage",
    "Durability",
    "HiCacheError",
    "HiCacheStorage",
    "KeySpace",
    "Page",
    "PageInfo",
    "Retention",
    "Shard",
    "StorageClosed",
    "StorageStats",
    "StorageTimeout",
    "StorageUnavailable",
    "UnknownBackend",
    "UnsupportedOperation",
    "namespace_seed",
    "open_storage",
    "page_hashes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
