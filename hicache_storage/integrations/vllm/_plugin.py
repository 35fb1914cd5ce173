"""The plug-in of vLLM (`vllm.general_plugins`): with it, a config names no module."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress

logger: logging.Logger = logging.getLogger(__name__)

_MODULE = "hicache_storage.integrations.vllm"
_REGISTRIES = (
    (
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        "register_connector",
        "HiCacheConnector",
    ),
    (
        "vllm.v1.kv_offload.tiering.factory",
        "SecondaryTierFactory",
        "register_tier",
        "HiCacheTier",
    ),
)


def register() -> None:
    """Register the connector and the tier under the names of their classes.

    vLLM calls this in each of its processes, and ends if it raises. So if a registry differs, this
    prints a warning, and configs need the module path.
    """
    for module, factory, method, name in _REGISTRIES:
        try:
            add = getattr(getattr(importlib.import_module(module), factory), method)
            with suppress(ValueError):  # vLLM may call this twice in a process
                add(name, _MODULE, name)
        except (ImportError, AttributeError, TypeError) as error:
            logger.warning("vLLM does not know %s by name (%s): add %s", name, error, _MODULE)
