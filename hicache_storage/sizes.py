"""Sizes in bytes that people write: a number, an optional unit, and nothing else.

    1073741824    "1073741824"    "1GiB"    "1.5 GB"    "400g"

Units are B, KB, MB, GB, TB, PB and EB (powers of 1000) and KiB, MiB, ... (powers of 1024), in any case;
K is KB, and Ki is KiB. Text with anything else in it is refused: a parser that stops at the first odd
character takes "1,000GB" for one byte, and a store with that capacity evicts all its pages.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hicache_storage.whole_numbers import MOST

_GRAMMAR = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?) ?([kmgtpe]i?b?|b)?", re.IGNORECASE)
_PREFIXES = "kmgtpe"

EXPECTED = "a number of bytes, such as 1073741824 or '1GiB'"


def parse_nbytes(given: object) -> int:
    """Return the bytes that `given` names: an int, a float without a fraction, or text.

    Raises:
        ValueError: `given` is no size. The message does not repeat text, which may be a secret.
    """
    nbytes = _of_text(given) if isinstance(given, str) else _of_number(given)
    if not 0 <= nbytes <= MOST:
        raise ValueError(f"a size is at least 0 and at most {MOST} bytes")
    return nbytes


def _of_number(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise ValueError(f"a size is {EXPECTED}")  # noqa: TRY004 - pydantic wants a ValueError
    if isinstance(given, float) and not given.is_integer():
        raise ValueError("a size without a unit is a whole number of bytes")
    return int(given)


def _of_text(text: str) -> int:
    if text.rstrip().endswith("%"):
        raise ValueError(f"a share is no size: give {EXPECTED}")
    found = _GRAMMAR.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"a size is {EXPECTED}: digits with an optional decimal point, then B, KB, MB, GB, TB, KiB,"
            " MiB, GiB or TiB, and nothing else"
        )
    number, unit = Fraction(found[1]), (found[2] or "b").lower()
    if unit == "b" and number.denominator != 1:
        raise ValueError("a size without a unit is a whole number of bytes")
    power = _PREFIXES.find(unit[0]) + 1
    return int(number * (1024 if "i" in unit else 1000) ** power)
