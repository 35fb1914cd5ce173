"""Check that the installed SGLang has the interface that the adapter and the linker were written for.

The check runs once, when the adapter or the linker is loaded. It reports every difference that would
break a call later.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hicache_storage.integrations._interface_check import (
    field_names,
    method_difference,
    missing_names,
    require_no_difference,
    unknown_duties,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

TESTED_VERSIONS = ("0.5.22", "0.5.23")
LINKER_VERSIONS = ("0.5.23",)

# Parameters after `self`, with the names in sglang/srt/mem_cache/hicache_storage.py.
_METHODS = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "batch_exists": ("keys", "extra_info"),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "clear": (),
    "get_stats": (),
}
_NEWER_METHODS = {"on_host_pools_registered": ()}
_FIELDS = {
    "HiCacheStorageConfig": {
        "tp_rank",
        "tp_size",
        "pp_rank",
        "pp_size",
        "attn_cp_rank",
        "attn_cp_size",
        "is_mla_model",
        "enable_storage_metrics",
        "model_name",
        "tp_lcm_size",
        "should_split_heads",
        "extra_config",
    },
    "PoolTransfer": {"name", "host_indices", "keys", "hit_policy"},
    "PoolTransferResult": {"kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"},
}
_MEMBERS = {
    "PoolName": {"kv", "mamba", "swa", "indexer", "draft", "draft_indexer", "draft_swa"},
    "PoolHitPolicy": {"all_pages", "trailing_pages", "block_groups"},
}
_METRICS = {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"}
# Parameters of `UnifiedCacheLinker`, and of what the linker calls in SGLang.
_LINKER_METHODS = {
    "lookup": ("rid", "transfers"),
    "load": ("rid", "transfers"),
    "start_layer_wise_loading": (),
    "finish_layer_wise_loading": ("counter_index",),
    "cancel_queued_load": ("rid",),
    "offload": ("transfers", "session_id"),
    "num_completed_offloads": (),
    "pop_completed_offload": (),
    "reset": (),
    "close": (),
}
_CONTROLLER_METHODS = {
    "write": ("device_indices", "priority", "node_id", "extra_pools", "flush", "start_owner"),
    "start_loading": (),
    "register_host_pool_entry": ("entry",),
    "_generate_storage_config": ("model_name", "storage_backend_extra_config"),
}
_ASSEMBLER_FUNCTIONS = {
    "_select_strategy": ("kvcache", "components"),
    "build_hicache_draft_sidecars": ("draft_device_pools", "tree_cache"),
}


def check_interface(storage: Any, metrics: Any, version: str) -> None:
    """Compare SGLang's modules `hicache_storage` and `metrics_collector` with the known interface.

    Raises:
        ImportError: The interfaces differ. The message has every difference and the remedy.
    """
    found = differences(storage, metrics)
    require_no_difference(found, "SGLang", version, "storage", TESTED_VERSIONS)


def check_linker_interface(linker: Any, controller: Any, assembler: Any, version: str) -> None:
    """Compare SGLang's modules with what the linker knows.

    These are `unified_cache_linker`, `hybrid_cache_controller` and `hybrid_pool_assembler`.

    Raises:
        ImportError: The interfaces differ. The message has every difference and the remedy.
    """
    base = getattr(linker, "UnifiedCacheLinker", None)
    if base is None:
        found = ["UnifiedCacheLinker is missing"]
    else:
        found = _method_differences(base, _LINKER_METHODS)
        found += unknown_duties(base, {*_LINKER_METHODS})
    found += _method_differences(
        getattr(controller, "HybridCacheController", None), _CONTROLLER_METHODS
    )
    for name, expected in _ASSEMBLER_FUNCTIONS.items():
        function = getattr(assembler, name, None)
        actual = tuple(inspect.signature(function).parameters) if function else ()
        if actual != expected:
            found.append(f"{name} takes ({', '.join(actual)}) instead of ({', '.join(expected)})")
    found = [clause for clause in found if clause]
    require_no_difference(found, "SGLang", version, "linker", LINKER_VERSIONS)


def _method_differences(base: Any, methods: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [method_difference(base, name, expected) for name, expected in methods.items()]


def differences(storage: Any, metrics: Any) -> list[str]:
    """Return every difference from the known interface, each as a clause."""
    base = getattr(storage, "HiCacheStorage", None)
    if base is None:
        return ["HiCacheStorage is missing"]
    found = _method_differences(base, _METHODS)
    for name, expected in _NEWER_METHODS.items():
        if hasattr(base, name):
            found.append(method_difference(base, name, expected))
    known = {*_METHODS, *_NEWER_METHODS}
    found += unknown_duties(base, known)
    for name, fields in _FIELDS.items():
        found.append(
            missing_names(name, "field", fields, field_names(getattr(storage, name, None)))
        )
    for name, members in _MEMBERS.items():
        actual = {str(member.value) for member in getattr(storage, name, ())}
        found.append(missing_names(name, "member", members, actual))
    policies = {str(member.value) for member in getattr(storage, "PoolHitPolicy", ())}
    found += [
        f"PoolHitPolicy has a new member {name!r}"
        for name in sorted(policies - _MEMBERS["PoolHitPolicy"])
    ]
    actual = field_names(getattr(metrics, "StorageMetrics", None))
    found.append(missing_names("StorageMetrics", "field", _METRICS, actual))
    return [clause for clause in found if clause]
