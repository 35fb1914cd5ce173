"""Compute the GPU time that hits save, what this time is worth, and what the memory for hits costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.planning.settings import Prices

_GIB = 1 << 30
_HOUR_S = 3600


def savings(
    prices: Prices, *, saved_tokens: float, duration_s: float, host_nbytes: int, storage_nbytes: int
) -> dict[str, float | None]:
    """Return the GPU seconds that a trace saves, and the value, cost and net value for a month.

    The values are None if the prefill rate or the price of a GPU is not known.
    """
    cost = (
        host_nbytes / _GIB * prices.host_gib_month
        + storage_nbytes / _GIB * prices.storage_gib_month
    )
    figures: dict[str, float | None] = {
        "gpu_seconds": None,
        "gpus": None,
        "value_per_month": None,
        "cost_per_month": cost,
        "net_per_month": None,
    }
    if prices.prefill_tokens_per_s is None:
        return figures
    gpu_seconds = saved_tokens / prices.prefill_tokens_per_s
    gpus = gpu_seconds / duration_s
    figures |= {"gpu_seconds": gpu_seconds, "gpus": gpus}
    if prices.gpu_hour is not None:
        value = gpus * prices.busy_hours_per_month * prices.gpu_hour
        figures |= {"value_per_month": value, "net_per_month": value - cost}
    return figures
