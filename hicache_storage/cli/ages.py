"""Parse and format ages and times: `90s`, `12h`, `1d`, `2w`."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime

from hicache_storage.durations import format_age, with_unit
from hicache_storage.errors import shown

_LAST_TIME_S = 253_402_300_799.0
"""The end of the year 9999."""


def age(text: str) -> float:
    """Parse an age such as `1d` or `1.5h` into seconds. Usable as an argparse type."""
    seconds = with_unit(text)
    if not seconds:
        raise argparse.ArgumentTypeError(
            f"must be a time like 100ms, 90s, 30m, 12h, 1d or 2w, above 0, not {shown(text)!r}"
        )
    return seconds


def format_time(at_s: float) -> str:
    """Format a time as ISO 8601 in UTC, to the second. Times before 1970 or after 9999 are cut."""
    at_s = min(max(at_s, 0.0), _LAST_TIME_S)
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_age(text: str) -> str:
    """Add to a time of `format_time` how long ago it was."""
    age_s = round(time.time() - datetime.fromisoformat(text).timestamp())
    if age_s < 0:
        return f"{text}, {format_age(-age_s)} from now: a clock is wrong"
    return f"{text}, {format_age(age_s)} ago"
