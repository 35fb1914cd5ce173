"""Wrong stores: sizes and segments of pages that they can't do; KV-008, KV-004."""

from __future__ import annotations

import ctypes
from itertools import chain
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore, Stored

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


@caught_by("KV-008")
class EvenSizesOnly(DictStore):
    """Pages are copied as words of two bytes; the last byte of an odd one is zero."""

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        return data[: len(data) & ~1].ljust(len(data), b"\0")


@caught_by("KV-008")
class WholeWordsOnly(DictStore):
    """Pages whose size is no multiple of 8 are refused."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return not len(data) % 8 and super()._write_whole(space, page_hash, data)


@caught_by("KV-008")
class OneByteIsNothing(DictStore):
    """An object of one byte is a marker, and no page."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is not None and len(data) == 1 else data


@caught_by("KV-008")
class LosesMegabytes(DictStore):
    """Pages of more than 1 MiB are not stored, and the verdict is True (as of some servers)."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        if len(stored.data) <= 1 << 20:
            super()._put(key, stored)


@caught_by("KV-008")
class LengthIn24Bits(DictStore):
    """The length of a page is kept in 24 bits: of 16 MiB and more, only what is beyond is read."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data[: len(data) & 0xFFFFFF]


@caught_by("KV-008", "KV-102")
class SizedByTheFirst(DictStore):
    """Slots are as large as the pages of the key space that was opened first."""

    _slot_nbytes = 0

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._slot_nbytes = self._slot_nbytes or space.stored_nbytes

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored._replace(data=stored.data[: self._slot_nbytes]))


@caught_by("KV-008")
class PayloadsOnly(DictStore):
    """A page is taken to have `page_nbytes`; with a frame it is never whole, and refused."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return data is not None and len(data) == space.page_nbytes


@caught_by("KV-008")
class FramesMadeAnew(DictStore):
    """Only the payload is kept; the frame is filled with zeros when the page is read."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        bare = bytes(space.frame_nbytes) + data[space.frame_nbytes :]
        return super()._write_whole(space, page_hash, bare)


@caught_by("KV-008", check="a_frame_is_a_part_of_the_page")
class FirstSegmentOnly(DictStore):
    """Only the first segment of a page is stored, and filled up with zeros."""

    def _taken(self, page: Page) -> bytes:
        return bytes(page.segments[0]).ljust(page.nbytes, b"\0")


@caught_by("KV-008", check="any_segmentation_is_read_back_in_any_other")
class SixtyFourSegments(DictStore):
    """Of a page that is read, the segments after the 64th are not filled."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None or len(data) != page.nbytes:
            return False
        start = 0
        for part in page.segments[:64]:
            part[:] = data[start : start + part.nbytes]
            start += part.nbytes
        return True


@caught_by("KV-008")
class SegmentsOfOneSize(DictStore):
    """The segments of a page are taken to be as long as the first one."""

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        step = page.segments[0].nbytes if page.segments else 1
        parts = [bytes(part[:step]).ljust(step, b"\0") for part in page.segments]
        return b"".join(parts)[: len(data)].ljust(len(data), b"\0")


@caught_by("KV-008", check="a_frame_is_a_part_of_the_page")
class ReadsAsItWrote(DictStore):
    """A page is only found by who asks for it in the segments in which it was set."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._cuts: dict[bytes, list[int]] = {}

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        self._cuts[data] = [part.nbytes for part in page.segments]
        return data

    def _filled(self, page: Page, data: bytes | None) -> bool:
        cuts = [part.nbytes for part in page.segments]
        return data is not None and self._cuts[data] == cuts and super()._filled(page, data)


@caught_by("KV-008")
class OneVectorABatch(DictStore):
    """A batch is written as one vector of at most 1,024 segments; what is beyond is zero (IOV_MAX)."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        vector = list(chain.from_iterable(page.segments for page in pages))[:1024]
        written = b"".join(vector).ljust(space.stored_nbytes * len(pages), b"\0")
        starts = range(0, len(written), space.stored_nbytes)
        parts = [written[start : start + space.stored_nbytes] for start in starts]
        return self._answer(self._store(space, hashes, parts))


@caught_by("KV-008", check="segments_may_lie_in_any_order")
class SortsSegments(DictStore):
    """Segments are taken in the order of their addresses, to be copied in fewer pieces."""

    def _taken(self, page: Page) -> bytes:
        order = sorted(zip(page.addresses, page.segments, strict=True), key=lambda pair: pair[0])
        return b"".join(segment for _, segment in order)


@caught_by("KV-008", "KV-004")
class ReadsInOnePiece(DictStore):
    """A page is written to the address of its first segment, as if the others lay behind it."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None or len(data) != page.nbytes:
            return False
        ctypes.memmove(page.addresses[0][0], data, min(len(data), _reach(page)))
        return True


@caught_by("KV-004")
class ZeroesMissesInOnePiece(DictStore):
    """After a miss the page is zeroed from its first byte on, as if it were one piece of memory."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            ctypes.memset(page.addresses[0][0], 0, min(page.nbytes, _reach(page)))
        return super()._filled(page, data)


def _reach(page: Page) -> int:
    """Bytes from the start of the first segment to where the page's memory ends: no further."""
    return max(address + nbytes for address, nbytes in page.addresses) - page.addresses[0][0]
