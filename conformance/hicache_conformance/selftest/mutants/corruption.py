"""Wrong stores: what they make of pages that were damaged at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import xxhash

from hicache_conformance.scenarios.framed_store import PAGE_STORE
from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_storage.errors import CorruptPage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import PageInfo

_SEAL_NBYTES = 8


@caught_by(
    "KV-403:a_damaged_object_is_a_miss",
    "KV-403:an_extended_object_is_a_miss",
    says="extended by a byte",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class ServesLonger(Shelf):
    """Of a longer object as many bytes are read as a page has."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        return path.exists() and path.stat().st_size >= space.stored_nbytes

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data[: space.stored_nbytes]


@caught_by(
    "KV-404:a_flipped_bit_is_no_hit_without_the_page_store",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class ServesRot(Shelf):
    """Nothing finds a flipped bit, neither the store nor what is above it."""

    absent: ClassVar[Mapping[str, str]] = {PAGE_STORE: "its engine puts no checksum around pages"}


@caught_by(
    "KV-403:a_damaged_object_heals_when_it_is_set_after_a_miss",
    "KV-403:a_damaged_object_heals_when_it_is_set_unseen",
    says="cut by its last byte",
    seen_in="SGLang 0.5.23, file; LMCache 0.5.6, fs",
)
class NeverHeals(Shelf):
    """A set is done when there is a file of the page's name, whatever its length."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        path = self._path(space, page_hash)
        return path.exists() or super()._write_whole(space, page_hash, data)


@caught_by("KV-403:a_damaged_object_heals_when_it_is_set_unseen", says="cut by its last byte")
class HealsWhatItRead(NeverHeals):
    """A damaged file is removed by the get that finds it; a set that comes first changes nothing."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and len(data) != space.stored_nbytes:
            self._removed(space, page_hash)
        return data


@caught_by(
    "KV-403:a_removed_object_heals_when_it_is_set_unseen",
    "KV-502:a_page_deleted_elsewhere_can_be_set_again",
    seen_in="SGLang 0.5.23, file with its metadata cache",
)
class KnowsWhatItSet(Shelf):
    """A page that this handle has set is remembered, and not written a second time."""

    _written: set[Path] = own(set)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        path = self._path(space, page_hash)
        if path not in self._written and super()._write_whole(space, page_hash, data):
            self._written.add(path)
        return path in self._written

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._written.discard(self._path(space, page_hash))
        return super()._removed(space, page_hash)


@caught_by(
    "KV-403:a_damaged_object_is_a_miss",
    "KV-403:an_extended_object_is_a_miss",
    seen_in="SGLang 0.5.23, file",
)
class CopiesUnchecked(Shelf):
    """The length of what was read is not looked at: copying it into the page fails."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:  # noqa: ARG002 - the fault
        return data is not None

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is not None:
            page.copy_from(data)
        return data is not None


@caught_by("KV-403:the_page_store_heals_a_damaged_object", says="makes the whole call fail")
class CorruptIsAnError(Shelf):
    """A damaged page ends the whole call with `CorruptPage`."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and len(data) != space.stored_nbytes:
            raise CorruptPage("wrong_size", f"page {page_hash} has {len(data)} bytes")
        return data


@caught_by("KV-403:damaged_objects_do_not_break_listings", says="scan raised CorruptPage")
class ListingStumbles(Shelf):
    """A scan ends with an error at the first object that is not as long as a page."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        found = super()._names(space)
        for info in found:
            if info.nbytes != space.stored_nbytes:
                raise CorruptPage("wrong_size", f"page {info.page_hash} has {info.nbytes} bytes")
        return found


@caught_by("KV-404:a_flipped_bit_is_a_miss_and_heals", says="not healed by the next save")
class DeleteOnlyHides(Shelf):
    """A deleted page is only marked, and a set takes the mark away without writing the page."""

    _hidden: set[Path] = own(set)

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        return self._path(space, page_hash) not in self._hidden and super()._has(space, page_hash)

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        hidden = self._path(space, page_hash) in self._hidden
        return None if hidden else super()._read(space, page_hash)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        self._hidden.discard(self._path(space, page_hash))
        return super()._has(space, page_hash) or super()._write_whole(space, page_hash, data)

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        self._hidden.add(self._path(space, page_hash))
        return True


class _Sealed(Shelf):
    """Each file ends with a checksum of its own."""

    def _has(self, space: KeySpace, page_hash: str) -> bool:
        path = self._path(space, page_hash)
        return path.exists() and path.stat().st_size == space.stored_nbytes + _SEAL_NBYTES

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else self._opened(data)

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return super()._write_whole(space, page_hash, data + self._seal(data))

    def _seal(self, data: bytes) -> bytes:
        return xxhash.xxh3_64_digest(data)

    def _opened(self, data: bytes) -> bytes:
        raise NotImplementedError


@caught_by(
    "KV-404:a_flipped_bit_in_what_the_store_adds_does_no_harm", says="makes the whole call fail"
)
class SealUnread(_Sealed):
    """A seal beside a page is never checked: one that can't be decoded ends the call."""

    def _opened(self, data: bytes) -> bytes:
        data[-_SEAL_NBYTES:].decode("ascii", errors="strict")
        return data[:-_SEAL_NBYTES]

    def _seal(self, data: bytes) -> bytes:
        return xxhash.xxh32_hexdigest(data).encode()
