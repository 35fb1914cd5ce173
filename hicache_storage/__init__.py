"""KV-cache storage for LLM servers: one interface, many backends, and a cache that never lies.

The package holds the names that users and backend authors import. Its import loads the standard library
alone.
"""

from __future__ import annotations

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
