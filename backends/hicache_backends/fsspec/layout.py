"""The names of files, and the format of a page's file: its bytes, then a trailer that proves them.

    ID/manifest.json     a description of key space ID, as JSON
    ID/HASH              one page
    writing/TOKEN-N      a file that is not published yet

    offset  bytes  field of the trailer
    0       4      magic "HiFs"
    4       2      format version
    6       2      zeros
    8       16     xxh3-128 of key-space id and page hash
    24      8      xxh3-64 of the page's bytes and the 24 bytes before

A filesystem may show a file that is partly written, cut short or mixed up. Such a file does not end
with the digest of the bytes before it, so it is a miss.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import xxhash

from hicache_storage.backend_support.writer_lock import WRITER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

MANIFEST = "manifest.json"
WRITING = "writing"
"""The directory of files that are not published yet."""
UNPUBLISHED = re.compile(rf"{WRITER_TOKEN.pattern}-[0-9]+")
"""The pattern of the names of unpublished files. We leave files with other names alone."""
TRAILER_NBYTES = 32

_HEAD = struct.Struct("<4sHH16s")
_MAGIC = b"HiFs"
_VERSION = 1


def manifest_name(space_id: str) -> str:
    return f"{space_id}/{MANIFEST}"


def page_name(space_id: str, page_hash: str) -> str:
    return f"{space_id}/{page_hash}"


def file_nbytes(space: KeySpace) -> int:
    """Return the size of a page's file."""
    return space.stored_nbytes + TRAILER_NBYTES


def pack_page(page: Page, space_id: str, page_hash: str) -> bytes:
    """Return the contents of the page's file. This copies the page once."""
    return b"".join((*page.segments, _trailer(page.segments, space_id, page_hash)))


def unpack_page(data: bytes, space_id: str, page_hash: str) -> memoryview | None:
    """Return the page that a file contains, or None if the file is not exactly this page."""
    payload = memoryview(data)[: max(0, len(data) - TRAILER_NBYTES)]
    is_whole = data.endswith(_trailer((payload,), space_id, page_hash))
    return payload if is_whole else None


def _trailer(segments: Iterable[memoryview], space_id: str, page_hash: str) -> bytes:
    identity = xxhash.xxh3_128_digest(f"{space_id}/{page_hash}".encode())
    head = _HEAD.pack(_MAGIC, _VERSION, 0, identity)
    digest = xxhash.xxh3_64()
    for segment in segments:
        digest.update(segment)
    digest.update(head)
    return head + digest.digest()
