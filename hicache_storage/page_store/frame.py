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
from typing import TYPE_CHECKING, NamedTuple

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
_CLAIMS = struct.Struct("<HQQ")
_CLAIMS_OFFSET = 6


class FramedPage(NamedTuple):
    """A page and the memory of its header: what a host pool hands to the page store."""

    header: memoryview
    """Writable, `frame_nbytes` long; owned like the payload for the duration of a call."""
    payload: Page

    @property
    def stored(self) -> Page:
        """Header and payload as one page: what a storage sees."""
        payload = self.payload
        return Page.of_views((self.header, *payload.segments), len(self.header) + payload.nbytes)


def frame_nbytes(alignment: int) -> int:
    """The header's size for a store that needs segments and sizes of this alignment."""
    return -(-FRAME_NBYTES // alignment) * alignment


class Framing:
    """Writes and proves the frames of one key space. Immutable."""

    __slots__ = ("_checksum", "_space_id")

    def __init__(self, space: KeySpace, *, checksum: bool) -> None:
        self._checksum = checksum
        self._space_id = bytes.fromhex(space.id)

    def write(self, page: FramedPage, page_hash: str) -> None:
        """Describe `page` in its header, in place."""
        seal = payload_checksum(page.payload) if self._checksum else 0
        flags = _CHECKSUMMED if self._checksum else 0
        page.header[:] = self._header(page, page_hash, seal, flags)

    def check(self, page: FramedPage, page_hash: str) -> None:
        """Prove that `page`, as read, is the one that was asked for.

        Raises:
            CorruptPage: With the reason `corrupt` (bits differ from what was written, or a checksum is
                wanted and not there), `wrong_key` or `wrong_size`.
        """
        header = page.header
        if self._checksum:
            seal, flags = payload_checksum(page.payload), _CHECKSUMMED
        else:
            flags, _, seal = _CLAIMS.unpack_from(header, _CLAIMS_OFFSET)
        if bytes(header) != self._header(page, page_hash, seal, flags):
            raise self._complaint(page, page_hash)

    def _header(self, page: FramedPage, page_hash: str, seal: int, flags: int) -> bytes:
        digest = bytes.fromhex(page_hash)
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            flags,
            page.payload.nbytes,
            seal,
            self._space_id,
            len(digest),
            digest,
        )
        sealed = fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))
        return sealed.ljust(len(page.header), b"\0")

    def _complaint(self, page: FramedPage, page_hash: str) -> CorruptPage:
        """What is wrong with a header that is not the expected one."""
        header = page.header
        (seal,) = _SEAL.unpack_from(header, _HEADER.size)
        if seal != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
            return CorruptPage("corrupt", f"the header of page {page_hash} is damaged")
        magic, version, flags, nbytes, _, space_id, length, digest = _HEADER.unpack_from(header)
        if magic != _MAGIC or version != _VERSION or any(header[FRAME_NBYTES:]):
            return CorruptPage("corrupt", f"page {page_hash} has no header of version {_VERSION}")
        if space_id != self._space_id or digest[:length].hex() != page_hash:
            return CorruptPage("wrong_key", f"page {page_hash} holds {digest[:length].hex()}")
        if nbytes != page.payload.nbytes:
            return CorruptPage("wrong_size", f"page {page_hash} says it has {nbytes} bytes")
        if not flags & _CHECKSUMMED:
            return CorruptPage("corrupt", f"page {page_hash} was written without a checksum")
        return CorruptPage("corrupt", f"the payload of page {page_hash} is damaged")


def payload_checksum(page: Page) -> int:
    """xxh3-64 of the page's bytes. xxhash releases the GIL while it runs."""
    if len(page.segments) == 1:
        return xxhash.xxh3_64_intdigest(page.segments[0])
    state = xxhash.xxh3_64()
    for segment in page.segments:
        state.update(segment)
    return state.intdigest()
