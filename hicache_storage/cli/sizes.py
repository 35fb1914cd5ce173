"""Parse sizes, counts and shares."""

from __future__ import annotations

import argparse

from hicache_storage.errors import shown
from hicache_storage.scalars import counted, format_nbytes, parse_float, parse_nbytes

__all__ = ["counted", "format_nbytes", "parse_share", "share", "size", "size_from_zero"]


def size(text: str) -> int:
    """Parse a size of at least 1 byte. Usable as an argparse type."""
    nbytes = size_from_zero(text)
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"must be at least one byte, not {shown(text)!r}")
    return nbytes


def size_from_zero(text: str) -> int:
    """Parse a size that may be 0. Return its bytes. Usable as an argparse type."""
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {shown(text)!r}") from None


def share(text: str) -> float:
    """Parse a share such as `1%` or `0.01`, above 0 and at most 1. Usable as an argparse type."""
    value = parse_share(text)
    if value is None or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 1% or 0.01, not {shown(text)!r}")
    return value


def parse_share(text: str) -> float | None:
    """Parse a share of 0 or more, such as `30%` or `0.3`. Return None for any other text."""
    try:
        value = parse_float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None
    return value if value >= 0 else None
