"""Durations that people set: finite, and short enough for every wait."""

from __future__ import annotations

from numbers import Real
from typing import cast

from hicache_storage.scalars import format_number

MAX_DURATION_S = 1e6
"""Eleven days. Locks, `poll` and SQLite each overflow at some larger value, in the middle of a call."""


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Refuse a `value` that is no possible time limit. Accept 0 where `zero` is true.

    Raises:
        TypeError: `value` is no number, or a bool.
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
