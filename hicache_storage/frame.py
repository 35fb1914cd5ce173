"""The header in front of a stored page, and the proof that a page read is the one asked for.

    offset  bytes  field
    0       4      magic "HiKV"
    4       2      format version
    6       2      flags: bit 0, the payload checksum is there
    8       8      payload length
    16      8      xxh3-64 of the payload
    24      16     key-space id
    40      72     page hash: one length byte, the hash, zeros
    112     8      zeros
    120     8      xxh3-64 of the 120 bytes before

Little-endian. A frame has 128 bytes; a store that needs alignment gets it rounded up with zeros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from hicache_storage.errors import CorruptPage
from hicache_storage.page import Page

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace

FRAME_NBYTES = 128

_MAGIC = b"HiKV"
_VERSION = 1
_CHECKSUMMED = 1
_HEADER = struct.Struct("<4sHHQQ16sB71s8x")
_SEAL = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class FramedPage:
    """A page and the memory of its header: what a host pool hands to the page store."""

    header: memoryview
    """Writable, `frame_nbytes` long; owned like the payload for the duration of a call."""
    payload: Page

    @property
    def stored(self) -> Page:
        """Header and payload as one page: what a storage sees."""
        return Page(self.header, *self.payload.segments)


def frame_nbytes(alignment: int) -> int:
    """The header's size for a store that needs segments and sizes of this alignment."""
    return -(-FRAME_NBYTES // alignment) * alignment


def write_frame(page: FramedPage, space: KeySpace, page_hash: str, *, checksum: bool) -> None:
    """Describe `page` in its header, in place."""
    digest = bytes.fromhex(page_hash)
    header = page.header
    _HEADER.pack_into(
        header,
        0,
        _MAGIC,
        _VERSION,
        _CHECKSUMMED if checksum else 0,
        page.payload.nbytes,
        payload_checksum(page.payload) if checksum else 0,
        bytes.fromhex(space.id),
        len(digest),
        digest,
    )
    _SEAL.pack_into(header, _HEADER.size, xxhash.xxh3_64_intdigest(header[: _HEADER.size]))
    if len(header) > FRAME_NBYTES:
        header[FRAME_NBYTES:] = bytes(len(header) - FRAME_NBYTES)


def check_frame(page: FramedPage, space: KeySpace, page_hash: str, *, checksum: bool) -> None:
    """Prove that `page`, as read, is the one that was asked for.

    Raises:
        CorruptPage: With the reason `corrupt` (bits differ from what was written, or the checksum that
            the caller insists on is not there), `wrong_key` or `wrong_size`.
    """
    header = page.header
    if _SEAL.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(
        header[: _HEADER.size]
    ):
        raise CorruptPage("corrupt", f"the header of page {page_hash} is damaged")
    magic, version, flags, nbytes, seal, space_id, length, digest = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != _VERSION or any(header[FRAME_NBYTES:]):
        raise CorruptPage("corrupt", f"page {page_hash} has no header of version {_VERSION}")
    if space_id.hex() != space.id or digest[:length].hex() != page_hash:
        raise CorruptPage("wrong_key", f"page {page_hash} holds {digest[:length].hex()}")
    if nbytes != page.payload.nbytes:
        raise CorruptPage("wrong_size", f"page {page_hash} says it has {nbytes} bytes")
    if not checksum:
        return
    if not flags & _CHECKSUMMED:
        raise CorruptPage("corrupt", f"page {page_hash} was written without a checksum")
    if payload_checksum(page.payload) != seal:
        raise CorruptPage("corrupt", f"the payload of page {page_hash} is damaged")


def payload_checksum(page: Page) -> int:
    """xxh3-64 of the page's bytes. xxhash releases the GIL while it runs."""
    if len(page.segments) == 1:
        return xxhash.xxh3_64_intdigest(page.segments[0])
    state = xxhash.xxh3_64()
    for segment in page.segments:
        state.update(segment)
    return state.intdigest()
