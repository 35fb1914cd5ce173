"""Format the figures of a plan: sizes, bandwidths, shares, money."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.scalars import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping


def size(nbytes: float) -> str:
    """Format a size: `12.5 GiB`, or `none` for 0."""
    return format_nbytes(nbytes) if nbytes else "none"


def percent(share: float) -> str:
    """Format a share: `36.6 %`."""
    return f"{100 * share:.1f} %"


def amount(money: float | None) -> str:
    """Format an amount of money without a currency: `12,400`."""
    if money is None:
        return ""
    return f"{money:,.0f}" if abs(money) >= 100 else f"{money:,.2f}"


def duration(seconds: float) -> str:
    """Format a duration: `59 min`."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def option_name(option: Mapping[str, Any]) -> str:
    """Name an option: `L2 of 256 GiB, L3 of 4 TiB`."""
    storage = option["storage_nbytes"]
    return f"L2 of {size(option['host_nbytes'])}, " + (
        f"L3 of {size(storage)}" if storage else "no L3"
    )
