"""One page in one slot: a mark, the page's bytes, the same mark again, zeros up to a whole block.

    offset  bytes  field of the mark
    0       4      magic "HiSl"
    4       2      format version
    6       1      length of the page hash in bytes
    7       1      zero
    8       16     key-space id
    24      24     stamp: when (nanoseconds, big-endian), by whom, which of its writes; never used twice
    48      64     page hash, zeros
    112     8      zeros
    120     8      xxh3-64 of the 120 bytes before

Both marks and the page are written in one call, in this order. A write that stopped half way has changed
the first mark and not the last, so a slot whose marks are equal holds one whole page: that is what an
index which was lost is made from. Where pages are whole blocks each mark has a block of its own, so that
all three can go around the page cache.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace

BLOCK_NBYTES = 4096
MARK_NBYTES = 128
STAMP_NBYTES = 24

_FILE_NBYTES = 1 << 30
_MAGIC = b"HiSl"
_VERSION = 1
_FIELDS = struct.Struct("<4sHBx16s24s64s8x")
_SEAL = struct.Struct("<Q")


class Place(NamedTuple):
    """Where a page is, and which write of that slot it was."""

    slot: int
    stamp: bytes


class Found(NamedTuple):
    """What a mark says."""

    page_hash: str
    stamp: bytes


class Geometry:
    """The slots of one key space: sizes, offsets and marks. Immutable."""

    __slots__ = ("_id", "lead_nbytes", "nbytes", "slot_nbytes", "slots_per_file", "space")

    def __init__(self, space: KeySpace) -> None:
        self.space = space
        self._id = bytes.fromhex(space.id)
        self.nbytes = space.stored_nbytes
        self.lead_nbytes = BLOCK_NBYTES if self.is_blocks else MARK_NBYTES
        bare_nbytes = self.lead_nbytes + self.nbytes + MARK_NBYTES
        self.slot_nbytes = -(-bare_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        self.slots_per_file = max(1, _FILE_NBYTES // self.slot_nbytes)

    @property
    def is_blocks(self) -> bool:
        """Whether a page is made of whole blocks."""
        return self.nbytes % BLOCK_NBYTES == 0

    @property
    def tail_nbytes(self) -> int:
        """From the end of the page to the end of the slot."""
        return self.slot_nbytes - self.lead_nbytes - self.nbytes

    @property
    def last_mark_offset(self) -> int:
        """Of the mark behind the page, in its slot."""
        return self.lead_nbytes + self.nbytes

    def position(self, slot: int) -> tuple[int, int]:
        """The number of the file that a slot is in, and its offset there."""
        file, index = divmod(slot, self.slots_per_file)
        return file, index * self.slot_nbytes

    def mark(self, page_hash: str, stamp: bytes) -> bytes:
        """What proves that a slot holds this page, of this write."""
        digest = bytes.fromhex(page_hash)
        fields = _FIELDS.pack(_MAGIC, _VERSION, len(digest), self._id, stamp, digest)
        return fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))

    def read_mark(self, mark: bytes) -> Found | None:
        """What `mark` says; None where it is none of this key space."""
        if len(mark) != MARK_NBYTES or not mark.startswith(_MAGIC):
            return None
        _, _, length, _, stamp, digest = _FIELDS.unpack_from(mark)
        page_hash = digest[:length].hex()
        return Found(page_hash, stamp) if mark == self.mark(page_hash, stamp) else None
