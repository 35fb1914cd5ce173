"""Refuse to share vLLM's memory region with another connector or engine.

vLLM names the region of its CPU tier after the engine's id alone. Two offloading connectors of one
engine, or two engines with one id, map the same file, and each uses rows that the other one fills.
"""

from __future__ import annotations

import fcntl
import inspect
import logging
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm._settings import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

logger = logging.getLogger("vllm.hicache_storage")


def claim_region(spec: Any) -> None:
    """Lock the region of a scheduler's CPU tier until vLLM closes it, or its process ends.

    The tiers of one connector share vLLM's file descriptor, and so the lock.

    Raises:
        ConfigError: Another connector or engine holds the region.
    """
    region: Any = getattr(spec, "_scheduler_mmap", None)
    descriptor: int | None = getattr(region, "fd", None)
    if descriptor is None:
        logger.warning(
            "this vLLM does not show its memory region: give each engine an engine_id of its own"
        )
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{NAME}: two offloading connectors share {region.mmap_path}, so each would store the"
            " other one's KV: use one offloading connector in an engine, and leave engine_id out of"
            " --kv-transfer-config, or give each engine of this host its own"
        ) from error


def check_siblings(is_offloading: Callable[[Mapping[str, Any]], bool]) -> None:
    """Refuse a `MultiConnector` with several offloading connectors, before one of them maps the region.

    It gives a child no config that names the others, so this reads the config in its frame.

    Raises:
        ConfigError: There are several.
    """
    frame = inspect.currentframe()
    while frame is not None:
        config = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        children = _children(getattr(config, "kv_connector_extra_config", None))
        if _count(children, is_offloading) > 1:
            raise ConfigError(
                f"{NAME}: two offloading connectors share the memory region of this engine, so each"
                " would store the other one's KV: keep one of them under MultiConnector, and list"
                " further tiers in its secondary_tiers"
            )
        frame = frame.f_back


def _children(extra: Any) -> Sequence[Mapping[str, Any]]:
    return cast("Any", extra).get("connectors") or () if isinstance(extra, dict) else ()


def _count(
    children: Sequence[Mapping[str, Any]], is_offloading: Callable[[Mapping[str, Any]], bool]
) -> int:
    return sum(
        is_offloading(child)
        + _count(_children(child.get("kv_connector_extra_config")), is_offloading)
        for child in children
    )
