"""Wrong stores: hits with other bytes than those that were set; KV-003."""

from __future__ import annotations

import ctypes
from itertools import chain
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore, Stored

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


@caught_by("KV-003:any_bytes_are_read_back", says="the page holds zeros only")
class ZerosAreAbsent(DictStore):
    """A page that holds nothing but zeros is taken for an empty slot."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return super()._is_whole(space, data) and data is not None and any(data)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return [self._write_whole(space, *pair) for pair in zip(hashes, contents, strict=True)]


class _Deduplicated(DictStore):
    """Keeps equal pages once; what is taken for equal is up to the subclass."""

    _bodies: dict[Hashable, bytes] = own(dict)

    def _print_of(self, data: bytes) -> Hashable:
        raise NotImplementedError

    def _put(self, key: Hashable, stored: Stored) -> None:
        body = self._bodies.setdefault(self._print_of(stored.data), stored.data)
        super()._put(key, stored._replace(data=body))


@caught_by("KV-003:pages_that_are_nearly_equal_are_apart", says="another page differs")
class ComparesEnds(_Deduplicated):
    """Pages are kept once if their lengths and their first and last 64 bytes are equal."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), data[:64], data[-64:]


@caught_by("KV-003:hashes_that_are_alike_are_apart", says="zeros at the end")
class HashesPadded(DictStore):
    """Page hashes are filled up with zeros to 64 bytes."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, bytes.fromhex(page_hash).ljust(64, b"\0")


class _SizeBlind(DictStore):
    """Pages are kept under their hash and model alone, whatever their size."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.model, page_hash


@caught_by(
    "KV-003:a_page_of_another_size_is_no_hit",
    says="is asked for with 999",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class LongerPagesServe(_SizeBlind):
    """A longer page under the same hash is a hit with its first bytes."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return data is not None and len(data) >= space.stored_nbytes

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        return [None if data is None else data[: space.stored_nbytes] for data in found]


@caught_by("KV-003:sizes_under_one_hash_are_apart", says="other page sizes have this hash")
class OneSizeAtATime(_SizeBlind):
    """A page of another size under the same hash takes the place of the one that was there."""


@caught_by("KV-003:a_page_reads_the_same_every_time", says="never set")
class ServesItsLastRead(DictStore):
    """A read that finds nothing gives what is left in the buffer of the read before, of its size."""

    _buffer = b""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None:
            self._buffer = data
        elif len(self._buffer) == space.stored_nbytes and space.stored_nbytes > 4096:
            return self._buffer
        return data


@caught_by("KV-008:every_size_of_page_works", says="pages of 1 bytes")
class OneByteIsNothing(DictStore):
    """An object of one byte is a marker, and no page."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is not None and len(data) == 1 else data


@caught_by("KV-008:large_pages_work", says="pages of 1048577 bytes")
class LosesMegabytes(DictStore):
    """Pages of more than 1 MiB are not stored, and the verdict is True (as of some servers)."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        if len(stored.data) <= 1 << 20:
            super()._put(key, stored)


@caught_by(
    "KV-008:sizes_coexist_in_one_store",
    "KV-102:pools_of_one_hash_coexist",
    says="other page sizes were used|of 'mamba'",
    seen_in="SGLang 0.5.23, hf3fs",
)
class SizedByTheFirst(DictStore):
    """Slots are as large as the pages of the key space that was opened first."""

    _slot_nbytes = 0

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._slot_nbytes = self._slot_nbytes or space.stored_nbytes

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored._replace(data=stored.data[: self._slot_nbytes]))


@caught_by(
    "KV-008:a_frame_is_a_part_of_the_page",
    "KV-008:any_segmentation_is_read_back_in_any_other",
    says="a frame of 64 bytes|was set in 2 segments",
)
class ReadsAsItWrote(DictStore):
    """A page is only found by who asks for it in the segments in which it was set."""

    _cuts: dict[bytes, list[int]] = own(dict)

    def _taken(self, page: Page) -> bytes:
        data = super()._taken(page)
        self._cuts[data] = [part.nbytes for part in page.segments]
        return data

    def _filled(self, page: Page, data: bytes | None) -> bool:
        cuts = [part.nbytes for part in page.segments]
        return data is not None and self._cuts[data] == cuts and super()._filled(page, data)


@caught_by("KV-008:batches_of_many_segments_work", says="512 segments each")
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


@caught_by("KV-008:segments_may_lie_in_any_order", says="shifted by 2000 bytes")
class SortsSegments(DictStore):
    """Segments are taken in the order of their addresses, to be copied in fewer pieces."""

    def _taken(self, page: Page) -> bytes:
        order = sorted(zip(page.addresses, page.segments, strict=True), key=lambda pair: pair[0])
        return b"".join(segment for _, segment in order)


@caught_by("KV-004:a_batch_writes_into_its_own_pages_only", says="of 2 segments")
class ZeroesMissesInOnePiece(DictStore):
    """After a miss the page is zeroed from its first byte on, as if it were one piece of memory."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            ctypes.memset(page.addresses[0][0], 0, min(page.nbytes, _reach(page)))
        return super()._filled(page, data)


def _reach(page: Page) -> int:
    """Bytes from the start of the first segment to where the page's memory ends: no further."""
    return max(address + nbytes for address, nbytes in page.addresses) - page.addresses[0][0]
