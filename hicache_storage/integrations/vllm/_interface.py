"""Check that the installed vLLM has the interface that the adapter was written for.

The check runs once, when the adapter is loaded. It reports every difference that would break a call
later.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_storage.integrations._interface_check import (
    field_names,
    method_difference,
    missing_names,
    require_no_difference,
    unknown_duties,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

TESTED_VERSIONS = ("0.32.0", "0.33.0")


class Modules(NamedTuple):
    """The vLLM modules that the adapter uses."""

    base: Any
    """`vllm.v1.kv_offload.base`."""
    config: Any
    """`vllm.v1.kv_offload.config`."""
    tiering: Any
    """`vllm.v1.kv_offload.tiering.base`."""
    connector: Any
    """`vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector`."""
    metrics: Any
    """`vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics`."""
    kv_cache: Any
    """`vllm.v1.kv_cache_interface`."""


# Parameters after `self` or `cls`.
_TIER = {
    "__init__": ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "on_new_request": ("req_context",),
    "on_request_finished": ("req_context",),
    "on_schedule_end": ("context",),
    "take_events": (),
    "drain_jobs": (),
    "get_stats": (),
    "build_metric_definitions": ("extra_config",),
    "shutdown": (),
}
_CONNECTOR = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "build_prom_metrics": (
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ),
}
_STATS = {
    "increase_counter": ("counter_name", "counter_increase_value", "labelvalues"),
    "set_gauge": ("gauge_name", "gauge_value", "labelvalues"),
    "observe_histogram": ("histogram_name", "histogram_value", "labelvalues"),
}
_FIELDS: Mapping[str, Mapping[str, set[str]]] = {
    "base": {
        "OffloadingEvent": {"keys", "medium", "removed", "locality"},
        "OffloadingCounterMetadata": {"documentation", "labelnames"},
        "OffloadingGaugeMetadata": {"documentation", "labelnames"},
        "OffloadingHistogramMetadata": {"documentation", "labelnames", "buckets"},
        "OffloadingKVEventsConfig": {"enable_kv_cache_events", "self_describing_kv_events"},
        "ReqContext": {"req_id"},
        "ScheduleEndContext": {"preempted_req_ids"},
    },
    "tiering": {
        "TransferJob": {"job_id", "keys", "chunk_ids", "req_context"},
        "JobResult": {
            *("job_id", "success", "successful_keys"),
            *("transfer_time", "transfer_bytes"),
        },
    },
    "config": {
        "OffloadingConfig": {
            *("groups", "model", "cache", "parallel"),
            *("replicated_layout", "canonical_layout", "kv_cache_layout"),
        },
        "OffloadingGroupConfig": {"tokens_per_block", "layer_names", "group_id"},
        "OffloadingModelConfig": {"name", "dtype"},
        "OffloadingCacheConfig": {"tokens_per_hash", "blocks_per_chunk"},
        "OffloadingParallelConfig": {
            *("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
            "is_parallelism_agnostic",
        },
    },
    "kv_cache": {
        "KVCacheConfig": {"num_blocks", "kv_cache_tensors", "kv_cache_groups"},
        "KVCacheGroupSpec": {"layer_names", "kv_cache_spec"},
        "KVCacheTensor": {"size", "layers", "layer_stride", "block_stride", "offset"},
    },
}
_MEMBERS = {
    "LookupResult": {"MISS", "HIT", "RETRY"},
    "Medium": {"STORAGE"},
    "Locality": {"LOCAL", "REMOTE"},
}


def check_interface(modules: Modules, version: str) -> None:
    """Compare vLLM's modules with the known interface.

    Raises:
        ImportError: The interfaces differ. The message has every difference and the remedy.
    """
    require_no_difference(differences(modules), "vLLM", version, "offloading", TESTED_VERSIONS)


def differences(modules: Modules) -> list[str]:
    """Return every difference from the known interface, each as a clause."""
    tier = getattr(modules.tiering, "SecondaryTierManager", None)
    found = [
        *_methods("SecondaryTierManager", tier, _TIER),
        *_methods(
            "OffloadingConnector",
            getattr(modules.connector, "OffloadingConnector", None),
            _CONNECTOR,
        ),
        *_methods(
            "OffloadingConnectorStats",
            getattr(modules.metrics, "OffloadingConnectorStats", None),
            _STATS,
        ),
    ]
    found += unknown_duties(tier, set(_TIER))
    for module, records in _FIELDS.items():
        for name, fields in records.items():
            record = getattr(getattr(modules, module), name, None)
            found.append(missing_names(name, "field", fields, field_names(record)))
    for name, members in _MEMBERS.items():
        actual = {str(member.name) for member in getattr(modules.base, name, ())}
        found.append(missing_names(name, "member", members, actual))
    return [clause for clause in found if clause]


def _methods(owner: str, base: Any, methods: Mapping[str, tuple[str, ...]]) -> list[str]:
    if base is None:
        return [f"{owner} is missing"]
    return [_difference(base, name, expected) for name, expected in methods.items()]


def _difference(base: Any, name: str, expected: tuple[str, ...]) -> str:
    found = method_difference(base, name, expected)
    return "" if found and _is_extended(getattr(base, name, None), expected) else found


def _is_extended(method: Any, expected: tuple[str, ...]) -> bool:
    """Return whether a constructor has further parameters that are all optional."""
    if getattr(method, "__name__", "") != "__init__":
        return False
    _, *parameters = inspect.signature(method).parameters.values()
    names = tuple(parameter.name for parameter in parameters)
    return names[: len(expected)] == expected and all(
        parameter.default is not inspect.Parameter.empty
        for parameter in parameters[len(expected) :]
    )
