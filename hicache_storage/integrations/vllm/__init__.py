"""The adapter for vLLM. It makes every backend of this project a secondary tier of vLLM's KV offloading.

    --kv-transfer-config '{"kv_connector": "HiCacheConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"cpu_bytes_to_use": 34359738368, "blocks_per_chunk": 16,
        "backend": "redis", "config": {"url": "redis://127.0.0.1:6379/0"}}}'

The first access to one of the two classes imports vLLM. See docs/vllm.md for the guide.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.integrations.vllm._connector import Connector
    from hicache_storage.integrations.vllm._tier import Tier

    HiCacheConnector: type[Connector]
    HiCacheTier: type[Tier]

__all__ = ["HiCacheConnector", "HiCacheTier"]

_OFFLOAD = "vllm.v1.kv_offload"
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


def _load() -> None:
    """Make the connector and the tier as subclasses of vLLM's classes, as its factories require.

    Raises:
        ImportError: vLLM is not installed, or its interface differs.
    """
    from hicache_storage.integrations._weights import process_started_s  # noqa: PLC0415
    from hicache_storage.integrations.vllm._connector import Connector  # noqa: PLC0415
    from hicache_storage.integrations.vllm._engine import EngineTypes  # noqa: PLC0415
    from hicache_storage.integrations.vllm._interface import (  # noqa: PLC0415
        Modules,
        check_interface,
    )
    from hicache_storage.integrations.vllm._runtime import Runtime  # noqa: PLC0415
    from hicache_storage.integrations.vllm._tier import Tier  # noqa: PLC0415

    _log_through_vllm()
    modules = Modules(
        base=importlib.import_module(f"{_OFFLOAD}.base"),
        config=importlib.import_module(f"{_OFFLOAD}.config"),
        tiering=importlib.import_module(f"{_OFFLOAD}.tiering.base"),
        connector=importlib.import_module(f"{_CONNECTORS}.offloading_connector"),
        metrics=importlib.import_module(f"{_CONNECTORS}.offloading.metrics"),
        kv_cache=importlib.import_module("vllm.v1.kv_cache_interface"),
    )
    version = str(importlib.import_module("vllm").__version__)  # vLLM's wheels have different names
    check_interface(modules, version)
    variables = importlib.import_module("vllm.envs").environment_variables
    base = modules.base
    own = multiprocessing.parent_process() is not None  # a process of the user may make checkpoints
    runtime = Runtime(
        version,
        importlib.import_module("vllm.platforms").current_platform,
        process_started_s() if own else None,
    )
    engine = EngineTypes(
        hit=base.LookupResult.HIT,
        miss=base.LookupResult.MISS,
        retry=base.LookupResult.RETRY,
        storage_medium=base.Medium.STORAGE,
        locality=base.Locality,
        job_result=modules.tiering.JobResult,
        event=base.OffloadingEvent,
        request_context=base.RequestOffloadingContext,
        stats=modules.metrics.OffloadingConnectorStats,
        counter=base.OffloadingCounterMetadata,
        gauge=base.OffloadingGaugeMetadata,
        histogram=base.OffloadingHistogramMetadata,
        runtime=runtime,
    )
    of_tier = {"engine": engine, "medium": base.Medium.STORAGE, **_named(Tier)}
    globals()["HiCacheTier"] = type(
        "HiCacheTier", (Tier, modules.tiering.SecondaryTierManager), of_tier
    )
    globals()["HiCacheConnector"] = type(
        "HiCacheConnector",
        (Connector, modules.connector.OffloadingConnector),
        {
            "runtime": runtime,
            "variables": variables,
            "is_offloading": staticmethod(
                partial(_is_offloading, modules.connector.OffloadingConnector)
            ),
            **_named(Connector),
        },
    )


def _is_offloading(base: type, child: Mapping[str, Any]) -> bool:
    """Return whether a child in the config of `MultiConnector` uses the region of vLLM's CPU tier."""
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    config = importlib.import_module("vllm.config.kv_transfer").KVTransferConfig
    return issubclass(factory.KVConnectorFactory.get_connector_class(config(**child)), base)


def _log_through_vllm() -> None:
    """Give our log lines vLLM's format and level, unless the process has configured our loggers."""
    for name in ("hicache_storage", "hicache_backends"):
        logger = logging.getLogger(name)
        if not logger.hasHandlers():
            logger.parent = logging.getLogger("vllm")


def _named(members: type) -> dict[str, Any]:
    return {"__module__": __name__, "__doc__": members.__doc__}
