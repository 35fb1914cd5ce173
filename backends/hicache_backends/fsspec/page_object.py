"""One page as one object: its bytes, then a trailer that proves them.

    offset  bytes  field of the trailer
    0       4      magic "HiFs"
    4       2      format version
    6       2      zeros
    8       16     xxh3-128 of key-space id and page hash
    24      8      xxh3-64 of the page's bytes and the 24 bytes before

Whatever a filesystem shows of an object that is being written, cut or mixed up: it does not end with the
digest of what is before it, and so is a miss.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.page import Page

TRAILER_NBYTES = 32

_HEAD = struct.Struct("<4sHH16s")
_MAGIC = b"HiFs"
_VERSION = 1


def packed(page: Page, space_id: str, page_hash: str) -> bytes:
    """The object that holds `page`: one copy of it."""
    return b"".join((*page.segments, _trailer(page.segments, space_id, page_hash)))


def unpacked(data: bytes, space_id: str, page_hash: str) -> memoryview | None:
    """The page in an object; None where the object is not this page, whole."""
    payload = memoryview(data)[: max(0, len(data) - TRAILER_NBYTES)]
    whole = data.endswith(_trailer((payload,), space_id, page_hash))
    return payload if whole else None


def _trailer(parts: Iterable[memoryview], space_id: str, page_hash: str) -> bytes:
    identity = xxhash.xxh3_128_digest(f"{space_id}/{page_hash}".encode())
    head = _HEAD.pack(_MAGIC, _VERSION, 0, identity)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    digest.update(head)
    return head + digest.digest()
