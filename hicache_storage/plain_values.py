"""Numbers and flags that people write: all of the text counts, and a flag is no number.

    4    "4"    2.5    "2.5"    true    "true"

A parser that is kinder takes `"1_0"` for 10, `"٣"` for 3 and `true` for one second. Sizes with units are
read by `hicache_storage.sizes`.
"""

from __future__ import annotations

import math
import re

from hicache_storage.whole_numbers import MOST

_WHOLE = re.compile(r"-?[0-9]{1,19}")
_DECIMAL = re.compile(r"-?[0-9]{1,19}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")
_FLAGS = {"true": True, "false": False}


def parse_whole(given: object) -> int:
    """Return the integer that `given` is: an int, a float without a fraction, or text of digits.

    Raises:
        ValueError: It is none. The message does not repeat text, which may be a secret.
    """
    if isinstance(given, str) and _WHOLE.fullmatch(given):
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ValueError("must be a whole number, such as 4")  # noqa: TRY004 - pydantic wants a ValueError
    if not _in_range(given):
        raise ValueError("must be a whole number of at most 64 bits")
    if given != int(given):
        raise ValueError("must be a whole number, without a fraction")
    return int(given)


def parse_decimal(given: object) -> float:
    """Return the number that `given` is: an int, a float, or text with a decimal point or exponent.

    Raises:
        ValueError: It is none, or not finite. The message does not repeat text, which may be a secret.
    """
    if isinstance(given, str) and _DECIMAL.fullmatch(given):
        given = float(given)
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ValueError("must be a number, such as 2.5")  # noqa: TRY004 - pydantic wants a ValueError
    if isinstance(given, int) and not _in_range(given):
        raise ValueError("must be a number of at most 64 bits")
    if not math.isfinite(given):
        raise ValueError("must be a finite number")
    return float(given)


def parse_flag(given: object) -> bool:
    """Return the flag that `given` is: a bool, or `true` or `false` as text, in any case.

    Raises:
        ValueError: It is none. The message does not repeat text, which may be a secret.
    """
    flag = _FLAGS.get(given.lower()) if isinstance(given, str) else given
    if not isinstance(flag, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - pydantic wants a ValueError
    return flag


def _in_range(number: float) -> bool:
    return -MOST <= number <= MOST
