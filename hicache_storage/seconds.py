"""Times that people set: finite, and short enough for whatever waits."""

from __future__ import annotations

# Eleven days. Locks, `poll` and SQLite each overflow somewhere above, in the middle of a call.
LONGEST_S = 1e6


def check_seconds(name: str, value: float, *, zero: bool = False) -> None:
    """Refuse what cannot be waited for; `zero` may be, where that means not at all.

    Raises:
        ValueError: Names the setting and its value.
    """
    if not (0 < value <= LONGEST_S or (zero and value == 0)):
        least = "at least 0" if zero else "greater than 0"
        raise ValueError(f"{name} must be {least} and at most {LONGEST_S:.0f} seconds, not {value}")
