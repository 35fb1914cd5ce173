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

Numbers are little-endian. A frame has 128 bytes. If a store needs an alignment, zeros fill the frame
up to a multiple of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

import xxhash

from hicache_storage import native
from hicache_storage.backend_support.revocable import states_of
from hicache_storage.errors import CorruptPage
from hicache_storage.native.reference.frames import FRAME_FIELDS, FRAME_NBYTES, FRAME_SEAL
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Revocable

__all__ = [
    "FRAME_NBYTES",
    "FramedPage",
    "Framing",
    "are_right",
    "completed_checksums",
    "frame_nbytes",
    "payload_checksums",
]

_MAGIC = b"HiKV"
_VERSION = 1
_CHECKSUMMED = 1


class FramedPage:
    """A page with memory for its header. Storages move pages in this form.

    Attributes:
        header: Writable memory of `frame_nbytes` bytes.
        payload: The page.
        stored: Header and payload as one page, which the storage gets.
    """

    __slots__ = ("header", "payload", "stored")

    def __init__(
        self, header: memoryview, payload: Page, revocable: Revocable | None = None
    ) -> None:
        """Make a page. `revocable` applies to this move only, and replaces that of the payload."""
        self.header: memoryview = header
        self.payload: Page = payload
        self.stored: Page = Page.of_views(
            (header, *payload.segments),
            len(header) + payload.nbytes,
            revocable or payload.revocable,
        )

    @classmethod
    def of_memory(cls, memory: memoryview, frame_nbytes: int, page_nbytes: int) -> Self:
        """Make a page at the begin of `memory`. Its header and payload are one segment of `stored`."""
        whole = memory[: frame_nbytes + page_nbytes]
        framed = cls(whole[:frame_nbytes], Page.of_views((whole[frame_nbytes:],), page_nbytes))
        framed.stored = Page.of_views((whole,), whole.nbytes)
        return framed


def frame_nbytes(alignment: int) -> int:
    """Return the size of the header for a store that needs segments and sizes of this alignment."""
    return -(-FRAME_NBYTES // alignment) * alignment


class Framing:
    """The frames of one key space: `write` makes them, `errors` checks them. Immutable."""

    __slots__ = ("_checksum", "_space_id")

    def __init__(self, space: KeySpace, *, checksum: bool) -> None:
        self._checksum = checksum
        self._space_id = bytes.fromhex(space.id)

    def write(self, pages: Sequence[FramedPage], hashes: Sequence[str]) -> None:
        """Write the headers of `pages` in place. A payload with a digest is not hashed again."""
        digests = [page.payload.digest for page in pages] if self._checksum else None
        native.write_frames(
            [page.header for page in pages],
            hashes,
            self._space_id,
            _payload_nbytes(pages),
            None if digests is None else _completed(pages, digests),
        )

    def errors(
        self,
        pages: Sequence[FramedPage],
        hashes: Sequence[str],
        checksums: Sequence[int | None] | None = None,
    ) -> dict[int, CorruptPage]:
        """Check that `pages`, which a storage has filled, are the pages of `hashes`.

        Args:
            pages: Pages of one size.
            hashes: Their page hashes.
            checksums: The checksum of each payload, or None if it is not known yet.

        Returns:
            The error of each wrong page, by index. Its reason is `corrupt` (bits have changed since the
            write, or a required checksum is missing), `wrong_key` or `wrong_size`.
        """
        found = native.check_frames(
            [page.header for page in pages],
            hashes,
            self._space_id,
            _payload_nbytes(pages),
            _completed(pages, checksums) if self._checksum else None,
        )
        if found.count(native.HIT) == len(found):
            return {}
        return {
            index: self._mismatch(pages[index], hashes[index])
            for index, verdict in enumerate(found)
            if verdict != native.HIT
        }

    def _mismatch(self, page: FramedPage, page_hash: str) -> CorruptPage:
        """Return the error that says how a header differs from the expected one."""
        header = page.header
        (checksum,) = FRAME_SEAL.unpack_from(header, FRAME_FIELDS.size)
        if checksum != xxhash.xxh3_64_intdigest(header[: FRAME_FIELDS.size]):
            return CorruptPage("corrupt", f"the header of page {page_hash} is damaged")
        magic, version, flags, nbytes, _, space_id, length, digest = FRAME_FIELDS.unpack_from(
            header
        )
        if magic != _MAGIC or version != _VERSION or any(header[FRAME_NBYTES:]):
            return CorruptPage("corrupt", f"page {page_hash} has no header of version {_VERSION}")
        if space_id != self._space_id or digest[:length].hex() != page_hash:
            return CorruptPage(
                "wrong_key", f"page {page_hash} has the header of page {digest[:length].hex()}"
            )
        if nbytes != page.payload.nbytes:
            return CorruptPage(
                "wrong_size", f"the header of page {page_hash} says that it has {nbytes:,} bytes"
            )
        if not flags & _CHECKSUMMED:
            return CorruptPage("corrupt", f"page {page_hash} was written without a checksum")
        return CorruptPage("corrupt", f"the payload of page {page_hash} is damaged")


def are_right(space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool | None]:
    """Check stored pages, header included, that a storage has filled. None: the page was revoked.

    Each page keeps its digest, or gets it if its reader asked for one (`digest_skip`), so nobody has to
    hash it again. If no reader asked, only headers are checked, as with `checksum: none`.

    Args:
        space: A key space with frames.
        hashes: The hash of each page.
        pages: Pages of `space.stored_nbytes`. All readers ask for digests, or none.
    """
    if not pages:
        return []
    frame = space.frame_nbytes
    split = [_split(page, frame) for page in pages]
    checksums: list[int | None] | None = None
    if pages[0].digest_skip is not None:
        checksums = [page.digest if page.digest_skip == frame else None for page in pages]
        unknown = [index for index, checksum in enumerate(checksums) if checksum is None]
        if unknown:
            states = states_of([pages[index] for index in unknown])
            values = native.digests([split[index][1] for index in unknown], states)
            for index, value in zip(unknown, values, strict=True):
                checksums[index] = value
                if pages[index].digest_skip == frame:
                    pages[index].digest = value
    verdicts = native.check_frames(
        [header for header, _ in split],
        hashes,
        bytes.fromhex(space.id),
        space.page_nbytes,
        None if checksums is None else [checksum or 0 for checksum in checksums],
    )
    right: list[bool | None] = [verdict == native.HIT for verdict in verdicts]
    if checksums is not None and None in checksums:
        right = [None if sum_ is None else one for sum_, one in zip(checksums, right, strict=True)]
    return right


def _split(page: Page, frame_nbytes: int) -> tuple[memoryview, tuple[memoryview, ...]]:
    """Return the header and the payload of a stored page."""
    first = page.segments[0]
    if first.nbytes == frame_nbytes:
        return first, page.segments[1:]
    if first.nbytes > frame_nbytes:
        return first[:frame_nbytes], (first[frame_nbytes:], *page.segments[1:])
    stored = memoryview(page.tobytes())  # a header in several pieces: no engine has that
    return stored[:frame_nbytes], (stored[frame_nbytes:],)


def _payload_nbytes(pages: Sequence[FramedPage]) -> int:
    return pages[0].payload.nbytes if pages else 0


def _completed(
    pages: Sequence[FramedPage], checksums: Sequence[int | None] | None
) -> Sequence[int]:
    """Return the checksum of every payload, or 0 for a revoked page, which storages no longer read."""
    known = completed_checksums(pages, checksums)
    return [checksum or 0 for checksum in known] if None in known else cast("list[int]", known)


def completed_checksums(
    pages: Sequence[FramedPage], checksums: Sequence[int | None] | None
) -> Sequence[int | None]:
    """Return `checksums`, and compute the missing ones. A revoked page has None."""
    if checksums is None:
        return payload_checksums(pages)
    unknown = [index for index, checksum in enumerate(checksums) if checksum is None]
    if len(unknown) == len(pages):
        return payload_checksums(pages)
    known = list(checksums)
    values = payload_checksums([pages[index] for index in unknown]) if unknown else []
    for index, value in zip(unknown, values, strict=True):
        known[index] = value
    return known


def payload_checksums(pages: Sequence[FramedPage]) -> list[int | None]:
    """Return the xxh3-64 of each payload, in one call of the data plane. A revoked page has None."""
    segments = [page.payload.segments for page in pages]
    return native.digests(segments, states_of([page.stored for page in pages]))
