"""Figures of a plan in words: sizes, bandwidths, shares, money."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")


def size(nbytes: float) -> str:
    """Return a size with three digits or so: `12.5 GiB`, or `none` for 0."""
    if not nbytes:
        return "none"
    return _scaled(nbytes, 1024, _UNITS)


def bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth: `1.25 GB/s`."""
    return _scaled(bytes_per_s, 1000, _RATES)


def percent(share: float) -> str:
    """Return a share as `36.6 %`."""
    return f"{100 * share:.1f} %"


def amount(money: float | None) -> str:
    """Return an amount of money without a currency: `12,400`."""
    if money is None:
        return ""
    return f"{money:,.0f}" if abs(money) >= 100 else f"{money:,.2f}"


def duration(seconds: float) -> str:
    """Return a duration: `59 min`."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def option_name(option: Mapping[str, Any]) -> str:
    """Return an option in words: `L2 of 256 GiB, L3 of 4 TiB`."""
    storage = option["storage_nbytes"]
    return f"L2 of {size(option['host_nbytes'])}, " + (
        f"L3 of {size(storage)}" if storage else "no L3"
    )


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    number = 0
    while value >= base and number < len(units) - 1:
        value /= base
        number += 1
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[number]}"
