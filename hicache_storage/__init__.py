"""KV-cache storage for LLM servers: one interface, many backends, and a cache that verifies every page.

Import from here whatever you need to open a storage, name its pages, or write a backend. A name is
loaded when you first use it, so importing the package takes little time.

Examples:
    >>> from hicache_storage import KeySpace, Page, Shard, open_storage, page_hashes
    >>> space = KeySpace(model="my/model", dtype="bfloat16", layout="page_first", page_tokens=2,
    ...                  page_nbytes=4, shard=Shard(layers=(0, 1)))
    >>> hashes, target = page_hashes([1, 2], page_tokens=2), bytearray(4)
    >>> with open_storage("memory") as storage:
    ...     storage.batch_set(space, hashes, [Page(b"kv!!")])
    ...     storage.batch_get(space, hashes, [Page(target)])
    [True]
    [True]
    >>> bytes(target)
    b'kv!!'
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes milliseconds, in which Ctrl-C prints a traceback
if TYPE_CHECKING:
    from typing import Any

    from hicache_storage.errors import (
        BackendNotInstalled,
        ConfigError,
        CorruptPage,
        HiCacheError,
        NoSuchStore,
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
        Diagnosis,
        Durability,
        HiCacheStorage,
        PageFault,
        PageInfo,
        PageTimes,
        Retention,
        StorageStats,
        UnreadableKind,
        UnreadableSpace,
    )

    __version__: str
    """The version of the installed distribution."""

_MODULES = ("errors", "keys", "page", "storage", "registry")
"""The modules that are searched for a name, in this order."""

__all__ = [
    "BackendNotInstalled",
    "Capabilities",
    "ConfigError",
    "CorruptPage",
    "Diagnosis",
    "Durability",
    "HiCacheError",
    "HiCacheStorage",
    "KeySpace",
    "NoSuchStore",
    "Page",
    "PageFault",
    "PageInfo",
    "PageTimes",
    "Retention",
    "Shard",
    "StorageClosed",
    "StorageStats",
    "StorageTimeout",
    "StorageUnavailable",
    "UnknownBackend",
    "UnreadableKind",
    "UnreadableSpace",
    "UnsupportedOperation",
    "namespace_seed",
    "open_storage",
    "page_hashes",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("hicache-storage")
    for module in _MODULES if name in __all__ else ():
        found = vars(import_module(f"{__name__}.{module}"))
        if name in found:
            globals()[name] = found[name]
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
