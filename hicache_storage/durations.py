"""Times that people set: finite, and short enough for whatever waits."""

from __future__ import annotations

from numbers import Real
from typing import cast

from hicache_storage.whole_numbers import shown

# Eleven days. Locks, `poll` and SQLite each overflow somewhere above, in the middle of a call.
LONGEST_S = 1e6


def check_seconds(name: str, value: object, *, zero: bool = False) -> None:
    """Refuse what cannot be waited for; `zero` may be, where that means not at all.

    Raises:
        TypeError: It is no number, or a bool.
        ValueError: Names the setting and its value.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    seconds = cast("float", value)
    if not (0 < seconds <= LONGEST_S or (zero and seconds == 0)):
        least = "at least 0" if zero else "greater than 0"
        raise ValueError(
            f"{name} must be {least} and at most {LONGEST_S:.0f} seconds, not {shown(value)}"
        )
