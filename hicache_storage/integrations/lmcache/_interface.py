"""Check that the installed LMCache has the interface that the adapter was written for.

The check runs once, when the adapter is loaded. It reports every difference that would break a call
later.
"""

from __future__ import annotations

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

TESTED_VERSIONS = ("0.5.6", "0.5.7rc2")

# Parameters after `self`, with the names in lmcache/v1/distributed/l2_adapters/base.py.
_METHODS = {
    "__init__": ("max_capacity_bytes",),
    "get_store_event_fd": (),
    "get_lookup_and_lock_event_fd": (),
    "get_load_event_fd": (),
    "submit_store_task": ("keys", "objects"),
    "pop_completed_store_tasks": (),
    "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
    "query_lookup_and_lock_result": ("task_id",),
    "submit_unlock": ("keys",),
    "submit_load_task": ("keys", "objects"),
    "query_load_result": ("task_id",),
    "delete": ("keys",),
    "list_l2_keys": ("model_name", "page_size", "cursor"),
    "get_usage": (),
    "report_status": (),
    "close": (),
    "_notify_keys_stored": ("keys", "sizes"),
    "_notify_keys_accessed": ("keys",),
    "_notify_keys_deleted": ("keys", "sizes"),
}
_NEWER_METHODS = {"get_memory_tags": (), "submit_touch": ("keys",)}
_FIELDS: dict[str, dict[str, set[str]]] = {
    "api": {
        "ObjectKey": {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"},
        "MemoryLayoutDesc": {"shapes", "dtypes"},
        "EncodedObjectKey": {
            "chunk_hash_hex",
            "model_name",
            "kv_rank",
            "object_group_id",
            "cache_salt",
        },
        "KeyEntry": {"key", "size_bytes"},
        "KeyListPage": {"entries", "next_page_token"},
    },
    "internal_api": {"L1MemoryDesc": {"ptr", "size"}},
    "memory": {"MemoryObjMetadata": {"shape", "dtype", "shapes", "dtypes"}},
}
_NEWER_FIELDS = {"MemoryTags": {"segment", "residency"}}
_MEMBERS: dict[str, dict[str, tuple[str, ...]]] = {
    "internal_api": {"L2StoreResult": ("is_successful", "bytes_transferred")},
    "memory": {
        "MemoryObj": (
            "byte_array",
            "get_size",
            "get_shape",
            "get_dtype",
            "get_shapes",
            "get_dtypes",
        )
    },
    "native": {"Bitmap": ("set", "test")},
    "config": {"L2AdapterConfigBase": ("from_dict", "help")},
    "reconfiguration": {"L2ReconfigureError": ("__init__",)},
}
_CONFIG_METHODS = {"from_dict", "help"}


def check_interface(modules: Mapping[str, Any], version: str) -> None:
    """Compare LMCache's modules with the known interface.

    Raises:
        ImportError: The interfaces differ. The message has every difference and the remedy.
    """
    require_no_difference(differences(modules), "LMCache", version, "L2", TESTED_VERSIONS)


def differences(modules: Mapping[str, Any]) -> list[str]:
    """Return every difference from the known interface, each as a clause."""
    base = getattr(modules["base"], "L2AdapterInterface", None)
    if base is None:
        return ["L2AdapterInterface is missing"]
    found = [method_difference(base, name, expected) for name, expected in _METHODS.items()]
    for name, expected in _NEWER_METHODS.items():
        if hasattr(base, name):
            found.append(method_difference(base, name, expected))
    found += unknown_duties(base, {*_METHODS, *_NEWER_METHODS})
    config = getattr(modules["config"], "L2AdapterConfigBase", None)
    found += unknown_duties(config, _CONFIG_METHODS)
    for module, records in _FIELDS.items():
        for name, fields in records.items():
            actual = field_names(getattr(modules[module], name, None))
            found.append(missing_names(name, "field", fields, actual))
    for name, fields in _NEWER_FIELDS.items():
        if hasattr(modules["api"], name):
            found.append(
                missing_names(name, "field", fields, field_names(vars(modules["api"])[name]))
            )
    for module, classes in _MEMBERS.items():
        for name, members in classes.items():
            actual = set(dir(getattr(modules[module], name, None)))
            found.append(missing_names(name, "method", set(members), actual))
    return [clause for clause in found if clause]
