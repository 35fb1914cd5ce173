"""Whole numbers that programs and people give: no flags, no fractions, no text."""

from __future__ import annotations

import operator
from typing import Any, cast

MOST = 2**63 - 1
"""What every format at rest, every protocol and every file system can hold."""


def check_whole(name: str, value: object, *, least: int, most: int = MOST) -> int:
    """Return `value` as a plain int, whatever integer type it has.

    Raises:
        TypeError: It is no integer; a bool is none.
        ValueError: It is out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not a bool")
    try:
        number = operator.index(cast("Any", value))
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from error
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, not {shown(number)}")
    return number


def shown(number: object) -> str:
    """The number for a message. Python refuses to write out more than some thousand digits."""
    if isinstance(number, int) and abs(number) > MOST:
        return f"a number of {number.bit_length()} bits"
    return str(number)
