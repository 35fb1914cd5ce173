"""The plug-in of SGLang (`sglang.srt.plugins`): with it, a config names no module and no class.

SGLang has no registry for these, so hooks write them into the config before SGLang reads it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_MODULE = "hicache_storage.integrations.sglang"
_BACKENDS = "sglang.srt.mem_cache.storage.backend_factory"
_LINKERS = "sglang.srt.mem_cache.unified_cache.linker_config"


def register() -> None:
    """Register the hooks. SGLang calls this in each of its processes, and logs what it raises."""
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    before, add = hooks.HookType.BEFORE, hooks.HookRegistry.register
    add(f"{_BACKENDS}.StorageBackendFactory.create_backend", name_the_storage, before)
    if importlib.util.find_spec(_LINKERS):  # SGLang 0.5.22 has no linkers
        add(f"{_LINKERS}.UnifiedCacheLinkerConfig.from_dict", name_the_linker, before)


def name_the_storage(
    _factory: Any, backend_name: str, storage_config: Any, *_: Any, **__: Any
) -> None:
    """Add our class to a config of the `dynamic` backend that names none."""
    fields = storage_config.extra_config
    if backend_name != "dynamic" or not fields or "backend_name" not in fields:
        return
    if "module_path" not in fields and "class_name" not in fields:
        fields |= {"module_path": _MODULE, "class_name": "SGLangHiCacheStorage"}
        fields.setdefault("interface_v1", 1)


def name_the_linker(cls: Any, value: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Return the arguments with our class, if a linker's config names none."""
    fields: Any = value
    if isinstance(value, dict) and [*fields] == ["linker_extra_config"]:
        fields = {"linker": "SGLangCacheLinker", "linker_module_path": _MODULE, **fields}
    return (cls, fields), {}
