"""Parse and check durations that people set. Each is finite, and not too long for any system call.

30    "30"    2.5    "90s"    "500ms"    "30m"    "1.5h"    "1d"    "2w"
"""

from __future__ import annotations

import re
from numbers import Real
from typing import cast

from hicache_storage.scalars import format_number, parse_float

MAX_DURATION_S = 1e6
"""Eleven days. Locks, `poll` and SQLite each overflow at some larger value, in the middle of a call."""

_WITH_UNIT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?(ms|[smhdw])", re.IGNORECASE | re.ASCII)
_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SHOWN = (("d", 86_400), ("h", 3600), ("m", 60))


def with_unit(text: str) -> float | None:
    """Return the seconds in a text such as `90s` or `1.5h`. None if it is not a number with a unit."""
    found = _WITH_UNIT.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _UNITS_S[found[2].lower()]


def parse_seconds(value: object) -> float:
    """Return the seconds that `value` names: a number, or text with or without a unit.

    Raises:
        ValueError: `value` is not a duration. The message does not repeat text, which may be a secret.
    """
    seconds = with_unit(value) if isinstance(value, str) else None
    try:
        return parse_float(value) if seconds is None else seconds
    except ValueError as error:
        raise ValueError(
            f"{error} (in seconds), or a time with a unit (ms, s, m, h, d or w), such as '90s' or '1d'"
        ) from None


def format_age(seconds: float) -> str:
    """Format an age in its two largest units: `3d 4h`, `12m 5s`, `40s`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for unit, unit_s in _SHOWN:
        if left >= unit_s or parts:
            parts.append(f"{left // unit_s}{unit}")
            left %= unit_s
    parts.append(f"{left}s")
    return " ".join(part for part in parts[:2] if not part.startswith("0") or len(parts) == 1)


def format_skew(skew_s: float) -> str:
    """Format how far one clock is ahead of another: `+0.2 s`, or `-3d` if it is behind."""
    if abs(skew_s) < 60:
        return f"{skew_s:+z.1f} s"
    return f"{'+' if skew_s > 0 else '-'}{format_age(abs(skew_s))}"


def longest_wait_s(timeout_s: float | None) -> float | None:
    """Return the limit for a lock: `timeout_s`, at most `MAX_DURATION_S`, or None for no limit."""
    return None if timeout_s is None else min(timeout_s, MAX_DURATION_S)


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Refuse a `value` that cannot be a time limit. Accept 0 if `zero` is True.

    Raises:
        TypeError: `value` is not a number, or is a bool.
        ValueError: `value` is out of range. The message names the setting and its value.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    seconds = cast("float", value)
    if not (0 < seconds <= MAX_DURATION_S or (zero and seconds == 0)):
        least = "at least 0" if zero else "greater than 0"
        raise ValueError(
            f"{name} must be {least} and at most {MAX_DURATION_S:.0f} seconds,"
            f" not {format_number(value)}"
        )
