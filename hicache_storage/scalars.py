"""Checks, parsers and texts of scalar values: integers, numbers, flags, and sizes in bytes.

    4    "4"    2.5    "2.5"    true    "true"    "1GiB"    "1.5 GB"

`check_integer` checks an integer that a program gives. The parsers read text that people write:
they accept the whole text or refuse it. A more generous parser would read `"1_0"` as 10, `"٣"` as
3, `true` as one second, and `"1,000GB"` as one byte. A store with a capacity of one byte evicts all
its pages.

A size is a number and an optional unit: B, KB, MB, GB, TB, PB or EB (powers of 1000), or KiB, MiB, GiB,
TiB, PiB or EiB (powers of 1024). No other spelling is accepted, because `1G` and `24Mb` mean different
sizes to different people. Sizes are printed in powers of 1024.
"""

from __future__ import annotations

import math
import operator
import os
import re
from typing import Any, cast

MAX_INT64 = 2**63 - 1
"""The largest integer that every file format, every protocol and every file system can hold."""

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_FLOAT = re.compile(r"-?[0-9]{1,19}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,3})?")
_BOOLS = {"true": True, "false": False}
_SIZE = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?) ?([KMGTPE]i?B|B)?", re.ASCII)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE_PREFIXES = "KMGTPE"
_SIZE_EXAMPLES = "a number of bytes, such as 1073741824 or '1GiB'"


def expand_home(path: str) -> str:
    """Return a path with a leading `~` or `~user` replaced by that home directory.

    Raises:
        ValueError: There is no such home directory, for example because a container gives its process a
            user id without a name. `~` would then be a directory in the current one.

    Examples:
        >>> expand_home("/mnt/kv")
        '/mnt/kv'
    """
    try:
        expanded = os.path.expanduser(path)  # noqa: PTH111 - that of pathlib raises RuntimeError
    except ValueError:  # a name that no user can have
        expanded = path
    if path.startswith("~") and not expanded.startswith("/"):
        raise ValueError("`~` has no meaning here: there is no home directory")
    return expanded


# --- values that programs give --------------------------------------------------------------------


def check_integer(name: str, value: object, *, least: int, most: int = MAX_INT64) -> int:
    """Return `value` as a plain int, whatever integer type it has.

    Raises:
        TypeError: `value` is not an integer, or is a bool.
        ValueError: `value` is out of range.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not a bool")
    try:
        number = operator.index(cast("Any", value))
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from error
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{name} must be {limit}, not {format_number(number)}")
    return number


def format_number(number: object) -> str:
    """Return the text of a number for a message.

    An integer of more than 64 bits is shown as its number of bits, because Python refuses to write
    more than a few thousand digits.
    """
    if isinstance(number, int) and abs(number) > MAX_INT64:
        return f"a number of {number.bit_length()} bits"
    return str(number)


# --- values that people read ----------------------------------------------------------------------


def format_nbytes(nbytes: float) -> str:
    """Return a size in powers of 1024 with at most four digits: `999 B`, `64 KiB`, `1.25 GiB`."""
    unit_nbytes, unit = unit_of(nbytes)
    number = nbytes / unit_nbytes
    is_whole = unit_nbytes == 1 or number == int(number)
    digits = 0 if is_whole or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{digits}f} {unit}"


def format_exact_nbytes(nbytes: int) -> str:
    """Return a size, with its exact bytes if it had to be rounded: `1.00 MiB (1,048,640 bytes)`."""
    is_exact = nbytes % unit_of(nbytes)[0] == 0
    return format_nbytes(nbytes) if is_exact else f"{format_nbytes(nbytes)} ({nbytes:,} bytes)"


def unit_of(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit in which a size is shown."""
    power = 0
    while nbytes >= 1023.5 * 1024**power and power < len(_UNITS) - 1:
        power += 1
    return 1024**power, _UNITS[power]


def counted(number: int, noun: str) -> str:
    """Return a number and what it counts: `1 page`, `2,000 pages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# --- values that people write ---------------------------------------------------------------------


def parse_integer(value: object) -> int:
    """Return the integer that `value` is: an int, a float without a fraction, or text of digits.

    Raises:
        ValueError: `value` is not an integer. The message does not repeat text, which may be a secret.
    """
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a whole number, such as 4")  # noqa: TRY004 - pydantic needs a ValueError
    if not _fits_64_bits(value):
        raise ValueError("must be a whole number of at most 64 bits")
    if value != int(value):
        raise ValueError("must be a whole number, without a fraction")
    return int(value)


def parse_float(value: object) -> float:
    """Return the number that `value` is: an int, a float, or text with a decimal point or exponent.

    Raises:
        ValueError: `value` is not a finite number. The message does not repeat text, which may be a
        secret.
    """
    if isinstance(value, str) and _FLOAT.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number, such as 2.5")  # noqa: TRY004 - pydantic needs a ValueError
    if isinstance(value, int) and not _fits_64_bits(value):
        raise ValueError("must be a number of at most 64 bits")
    if not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def parse_bool(value: object) -> bool:
    """Return the flag that `value` is: a bool, or `true` or `false` as text, in any case.

    Raises:
        ValueError: `value` is not a flag. The message does not repeat text, which may be a secret.
    """
    flag = _BOOLS.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(flag, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - pydantic needs a ValueError
    return flag


def parse_nbytes(value: object) -> int:
    """Return the bytes that `value` names: an int, a float without a fraction, or text.

    Raises:
        ValueError: `value` is not a size. The message does not repeat text, which may be a secret.
    """
    nbytes = _nbytes_of_text(value) if isinstance(value, str) else _nbytes_of_number(value)
    if not 0 <= nbytes <= MAX_INT64:
        raise ValueError(f"must be at least 0 and at most {MAX_INT64:,} bytes")
    return nbytes


def _nbytes_of_number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be {_SIZE_EXAMPLES}")  # noqa: TRY004 - pydantic needs a ValueError
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("a size without a unit must be a whole number of bytes")
    return int(value)


def _nbytes_of_text(text: str) -> int:
    from fractions import Fraction  # noqa: PLC0415 - `import hicache_storage.keys` stays fast

    if text.rstrip().endswith("%"):
        raise ValueError(f"a share is not a size: give {_SIZE_EXAMPLES}")
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"must be {_SIZE_EXAMPLES}; the units are"
            f" {', '.join(f'{prefix}B' for prefix in ('', *_SIZE_PREFIXES))},"
            f" {', '.join(_UNITS[1:-1])} and {_UNITS[-1]}"
        )
    number, unit = Fraction(match[1]), match[2] or "B"
    if unit == "B" and number.denominator != 1:
        raise ValueError("a size without a unit must be a whole number of bytes")
    power = _SIZE_PREFIXES.find(unit[0]) + 1
    return int(number * (1024 if "i" in unit else 1000) ** power)


def _fits_64_bits(number: float) -> bool:
    return -MAX_INT64 <= number <= MAX_INT64
