"""The adapter for LMCache. It makes every backend of this project an L2 adapter of LMCache's MP server.

    lmcache server --l2-adapter '{"type": "plugin",
      "module_path": "hicache_storage.integrations.lmcache", "class_name": "HiCacheL2Adapter",
      "adapter_params": {"backend": "redis", "config": {"url": "redis://127.0.0.1:6379/0"},
                         "revision": "main"}}'

The first access to one of the classes imports LMCache. See docs/lmcache.md for the guide.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.integrations.lmcache._adapter import Adapter
    from hicache_storage.integrations.lmcache._config import AdapterConfig
    from hicache_storage.integrations.lmcache._engine import ListedObject

    HiCacheL2Adapter: type[Adapter]
    HiCacheL2AdapterConfig: type[AdapterConfig]

__all__ = ["HiCacheL2Adapter", "HiCacheL2AdapterConfig"]

_DISTRIBUTED = "lmcache.v1.distributed"
_MODULES = {
    "api": f"{_DISTRIBUTED}.api",
    "base": f"{_DISTRIBUTED}.l2_adapters.base",
    "config": f"{_DISTRIBUTED}.l2_adapters.config",
    "internal_api": f"{_DISTRIBUTED}.internal_api",
    "memory": "lmcache.v1.memory_management",
    "native": "lmcache.lmcache_native",
    "reconfiguration": f"{_DISTRIBUTED}.l2_adapters.reconfiguration",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(_classes())
    return globals()[name]


def _classes() -> dict[str, type]:
    """Return the adapter and its config, as subclasses of the classes that LMCache requires.

    Raises:
        ImportError: LMCache is not installed, or its interface differs.
    """
    from hicache_storage.integrations.lmcache._adapter import Adapter  # noqa: PLC0415
    from hicache_storage.integrations.lmcache._config import AdapterConfig  # noqa: PLC0415
    from hicache_storage.integrations.lmcache._engine import EngineTypes  # noqa: PLC0415
    from hicache_storage.integrations.lmcache._interface import check_interface  # noqa: PLC0415

    importlib.import_module("torch")  # LMCache's native library is linked against torch
    modules = {name: importlib.import_module(path) for name, path in _MODULES.items()}
    version = str(importlib.import_module("lmcache").__version__)
    check_interface(modules, version)
    _log_as_lmcache()
    engine = EngineTypes(
        bitmap=modules["native"].Bitmap,
        store_result=modules["internal_api"].L2StoreResult,
        reconfigure_error=modules["reconfiguration"].L2ReconfigureError,
        memory_tags=lambda shared: _memory_tags(modules["api"], shared=shared),
        serde=_serde,
        key_page=lambda found, token: _key_page(modules["api"], found, token),
        version=version,
    )
    bases: dict[str, tuple[type, type, dict[str, object]]] = {
        "HiCacheL2Adapter": (Adapter, modules["base"].L2AdapterInterface, {"engine": engine}),
        "HiCacheL2AdapterConfig": (AdapterConfig, modules["config"].L2AdapterConfigBase, {}),
    }
    return {
        name: type(name, (own, base), {"__module__": __name__, "__doc__": own.__doc__, **members})
        for name, (own, base, members) in bases.items()
    }


def _log_as_lmcache() -> None:
    """Give our log lines LMCache's format and level, unless the process has configured our loggers."""
    for name in ("hicache_storage", "hicache_backends"):
        if not logging.getLogger(name).hasHandlers():
            importlib.import_module("lmcache.logging").init_logger(name)


def _memory_tags(api: Any, *, shared: bool) -> Any:
    """Return LMCache's memory tags for a storage. Return None if this LMCache has no tags."""
    if not hasattr(api, "MemoryTags"):
        return None
    residency = api.MemoryResidency.REMOTE if shared else api.MemoryResidency.LOCAL
    return api.MemoryTags(api.MemorySegment.STORAGE, residency)


def _key_page(api: Any, found: Sequence[ListedObject], token: str | None) -> Any:
    """Return one page of a listing as LMCache's record."""
    entries = tuple(
        api.KeyEntry(
            key=api.EncodedObjectKey(chunk_hash_hex=one.page_hash, **dataclasses.asdict(one.key)),
            size_bytes=one.nbytes,
        )
        for one in found
    )
    return api.KeyListPage(entries=entries, next_page_token=token)


def _serde(fields: Mapping[str, Any]) -> Any:
    """Return LMCache's processor for a serde.

    Raises:
        ValueError: LMCache does not have this serde.
    """
    serde = importlib.import_module(f"{_DISTRIBUTED}.serde")
    kwargs = {name: value for name, value in fields.items() if name != "type"}
    return serde.create_serde_processor(serde.SerdeConfig(type=fields["type"], kwargs=kwargs))
