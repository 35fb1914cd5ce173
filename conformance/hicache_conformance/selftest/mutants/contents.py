"""Wrong stores: hits with other bytes than those that were set; KV-003."""

from __future__ import annotations

import gzip
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore, Stored
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_storage.keys import KeySpace


@caught_by("KV-003")
class TrimsZeros(DictStore):
    """Zeros at the end are not stored, and what is too short is a miss."""

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored._replace(data=stored.data.rstrip(b"\0")))


@caught_by("KV-003")
class StopsAtZero(DictStore):
    """A page ends at its first zero byte, as a text in C; the rest is read as zeros."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        text = data.split(b"\0", 1)[0]
        return super()._write_whole(space, page_hash, text.ljust(len(data), b"\0"))


@caught_by("KV-003")
class TrimsWhiteSpace(DictStore):
    """White space at the ends of a page is cut off, and filled up with zeros."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return super()._write_whole(space, page_hash, data.strip().ljust(len(data), b"\0"))


@caught_by("KV-003")
class ZerosAreAbsent(DictStore):
    """A page that holds nothing but zeros is taken for an empty slot."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return super()._is_whole(space, data) and data is not None and any(data)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        return [self._write_whole(space, *pair) for pair in zip(hashes, contents, strict=True)]


@caught_by("KV-003")
class ReadsFilesAsText(Shelf):
    """Files are opened as text, so that each CR LF is read as one character."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        return None if data is None else data.replace(b"\r\n", b"\n")


@caught_by("KV-003")
class UnpacksWhatLooksPacked(DictStore):
    """A page that begins like a gzip file is unpacked when it is read."""

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and data.startswith(b"\x1f\x8b"):
            with suppress(OSError, EOFError):
                return gzip.decompress(data)
        return data


class _Deduplicated(DictStore):
    """Keeps equal pages once; what is taken for equal is up to the subclass."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._bodies: dict[Hashable, bytes] = {}

    def _print_of(self, data: bytes) -> Hashable:
        raise NotImplementedError

    def _put(self, key: Hashable, stored: Stored) -> None:
        body = self._bodies.setdefault(self._print_of(stored.data), stored.data)
        super()._put(key, stored._replace(data=body))


@caught_by("KV-003")
class ComparesEnds(_Deduplicated):
    """Pages are kept once if their lengths and their first and last 64 bytes are equal."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), data[:64], data[-64:]


@caught_by("KV-003")
class ComparesSums(_Deduplicated):
    """Pages are kept once if the sums of their bytes are equal."""

    def _print_of(self, data: bytes) -> Hashable:
        return len(data), sum(data)


@caught_by("KV-003")
class HashesCut(DictStore):
    """Of a page hash only the first 32 digits count."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, page_hash[:32]


@caught_by("KV-003")
class HashesCutAt64(DictStore):
    """Of a page hash only the first 64 digits count (a column of CHAR(64))."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, page_hash[:64]


@caught_by("KV-003")
class HashesCutInFront(DictStore):
    """Of a page hash only the last 16 digits count."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, page_hash[-16:]


@caught_by("KV-003")
class HashesAsIntegers(DictStore):
    """Page hashes are kept as integers, which have no zeros in front."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, int(page_hash, 16)


@caught_by("KV-003")
class HashesAsNumbers(DictStore):
    """Page hashes that look like decimal numbers are kept as such (a column of type NUMERIC)."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        with suppress(ValueError):
            return space.id, float(page_hash)
        return space.id, page_hash


@caught_by("KV-003")
class HashesPadded(DictStore):
    """Page hashes are filled up with zeros to 64 bytes."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, bytes.fromhex(page_hash).ljust(64, b"\0")


@caught_by("KV-003")
class HashesByChecksum(DictStore):
    """Pages are kept under the CRC-32 of their hash, and two that have the same are one."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.id, zlib.crc32(page_hash.encode())


class _SizeBlind(DictStore):
    """Pages are kept under their hash and model alone, whatever their size."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return space.model, page_hash


@caught_by("KV-003")
class LongerPagesServe(_SizeBlind):
    """A longer page under the same hash is a hit with its first bytes (seen in two file backends)."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return data is not None and len(data) >= space.stored_nbytes

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        return [None if data is None else data[: space.stored_nbytes] for data in found]


@caught_by("KV-003")
class ShorterPagesAreFilledUp(_SizeBlind):
    """A shorter page under the same hash is a hit, filled up with zeros: a partial read counts."""

    def _is_whole(self, space: KeySpace, data: bytes | None) -> bool:
        return data is not None and len(data) <= space.stored_nbytes

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        found = super()._contents(space, hashes)
        return [None if data is None else data.ljust(space.stored_nbytes, b"\0") for data in found]


@caught_by("KV-003")
class OneSizeAtATime(_SizeBlind):
    """A page of another size under the same hash takes the place of the one that was there."""


@caught_by("KV-003")
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
