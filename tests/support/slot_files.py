"""Slots and the memory of their pages, for the tests of the data plane."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

MARK_NBYTES = 128
BLOCK_NBYTES = 4096
ALL = bytes(range(256))
"""Every errno. With this set, any error of a call makes the data plane move its slots one by one."""

_ANOTHER = 99
_SOON_S = 3600.0


def soon() -> float:
    """Return a deadline that no test reaches."""
    return time.monotonic() + _SOON_S


def mark_of(number: int) -> bytes:
    return bytes([number + 1]) * MARK_NBYTES


def page_of(number: int, nbytes: int) -> bytes:
    return (bytes((number * 31 + n * 7) % 251 for n in range(251)) * (nbytes // 251 + 1))[:nbytes]


def slot_of(number: int, shape: tuple[int, int, int], *, wrong: str = "") -> bytes:
    """Return the bytes of a slot. The mark that `wrong` names, first or last, is of another slot."""
    lead, nbytes, tail = shape
    first, last = (mark_of(_ANOTHER if wrong == place else number) for place in ("first", "last"))
    return first.ljust(lead, b"\0") + page_of(number, nbytes) + last.ljust(tail, b"\0")


def cut(nbytes: int, at: Sequence[int], data: bytes = b"") -> list[bytearray]:
    """Return pieces of `nbytes` in all, with the bytes of `data`. Some of them are empty."""
    edges = [0, *sorted(edge % (nbytes + 1) for edge in at), nbytes]
    return [bytearray(data[start:end].ljust(end - start, b"\0")) for start, end in pairwise(edges)]


def files_of(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> tuple[str, list[bytes], int]:
    return str(path.parent), [path.name.encode()], flags
