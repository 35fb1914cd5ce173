"""The header in front of a stored page, and the check that a loaded page is the requested one.

    offset  bytes  field
    0       4      magic "HiKV"
    4       2      format version
    6       2      flags: bit 0 is set if there is a payload checksum
    8       8      payload length
    16      8      xxh3-64 of the payload
    24      16     key-space id
    40      72     page hash: one length byte, the hash, zeros
    112     8      zeros
    120     8      xxh3-64 of the 120 bytes before

Numbers are little-endian. A frame has 128 bytes. For a store that needs an alignment, zeros fill
the frame up to a multiple of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from hicache_storage import native
from hicache_storage.errors import CorruptPage
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace

FRAME_NBYTES = 128

_MAGIC = b"HiKV"
_VERSION = 1
_CHECKSUMMED = 1
_HEADER = struct.Struct("<4sHHQQ16sB71s8x")
_HEADER_CHECKSUM = struct.Struct("<Q")
_FLAGS_TO_CHECKSUM = struct.Struct("<HQQ")
_FLAGS_OFFSET = 6


class FramedPage(NamedTuple):
    """A page and the memory of its header, which a host pool gives to the page store."""

    header: memoryview
    """Writable memory of `frame_nbytes` bytes. A call borrows it, like the payload, until it ends."""
    payload: Page

    @property
    def stored(self) -> Page:
        """Header and payload as the one page that a storage gets."""
        payload = self.payload
        return Page.of_views((self.header, *payload.segments), len(self.header) + payload.nbytes)


def frame_nbytes(alignment: int) -> int:
    """Return the header's size for a store that needs segments and sizes of this alignment."""
    return -(-FRAME_NBYTES // alignment) * alignment


class Framing:
    """The frames of one key space: `write` makes them, `check` compares them. Immutable."""

    __slots__ = ("_checksum", "_space_id")

    def __init__(self, space: KeySpace, *, checksum: bool) -> None:
        self._checksum = checksum
        self._space_id = bytes.fromhex(space.id)

    def write(self, page: FramedPage, page_hash: str, checksum: int | None = None) -> None:
        """Write the header of `page` in place. `checksum` is that of the payload, where it is known."""
        flags = _CHECKSUMMED if self._checksum else 0
        if not self._checksum:
            checksum = 0
        elif checksum is None:
            (checksum,) = payload_checksums([page.payload])
        page.header[:] = self._header(page, page_hash, checksum, flags)

    def check(self, page: FramedPage, page_hash: str, checksum: int | None = None) -> None:
        """Check that `page`, which a storage has filled, is the page of `page_hash`.

        `checksum` is that of the payload, where it is known.

        Raises:
            CorruptPage: Its reason is `corrupt` (bits differ from the written ones, or a required
                checksum is missing), `wrong_key` or `wrong_size`.
        """
        header = page.header
        if not self._checksum:
            flags, _, checksum = _FLAGS_TO_CHECKSUM.unpack_from(header, _FLAGS_OFFSET)
        else:
            flags = _CHECKSUMMED
        if checksum is None:
            (checksum,) = payload_checksums([page.payload])
        if bytes(header) != self._header(page, page_hash, checksum, flags):
            raise self._mismatch(page, page_hash)

    def _header(self, page: FramedPage, page_hash: str, checksum: int, flags: int) -> bytes:
        digest = bytes.fromhex(page_hash)
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            flags,
            page.payload.nbytes,
            checksum,
            self._space_id,
            len(digest),
            digest,
        )
        header = fields + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
        return header.ljust(len(page.header), b"\0")

    def _mismatch(self, page: FramedPage, page_hash: str) -> CorruptPage:
        """Return the error that describes a header which is not the expected one."""
        header = page.header
        (checksum,) = _HEADER_CHECKSUM.unpack_from(header, _HEADER.size)
        if checksum != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
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


def payload_checksums(pages: Sequence[Page]) -> list[int]:
    """Return xxh3-64 of each page's bytes, in one call of the data plane."""
    return native.digests([page.segments for page in pages])
