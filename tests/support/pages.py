"""Key spaces, pages and hashes for tests."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.page import Page

_SPACE = KeySpace(
    model="meta-llama/Llama-3.1-8B-Instruct",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=16,
    page_nbytes=4096,
    shard=Shard(layers=(0, 32), heads=(0, 8)),
)


def space(**changes: Any) -> KeySpace:
    """Return a key space of 4096-byte pages, with `changes` to its fields."""
    return replace(_SPACE, **changes)


def page(nbytes: int = 4096, seed: int = 0) -> Page:
    """Return a writable page of one segment, whose bytes depend on `seed`."""
    return Page(bytearray(random.Random(seed).randbytes(nbytes)))


def blank(nbytes: int = 4096) -> Page:
    """Return a page to read into, filled with one byte."""
    return Page(bytearray(b"\xa5" * nbytes))


def hash_of(number: int) -> str:
    """Return a page hash. Different numbers have different hashes."""
    return hashlib.sha256(number.to_bytes(8, "little")).hexdigest()
