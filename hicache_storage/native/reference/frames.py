"""Build and check headers and trailers of pages, in Python, byte for byte as the compiled module."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import xxhash

from hicache_storage.native.reference.pieces import HIT, WRONG

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer


FRAME_NBYTES = 128
FRAME_FIELDS = struct.Struct("<4sHHQQ16sB71s8x")
"""The fields of a frame except its last 8 bytes. See `page_store.frame`."""
FRAME_SEAL = struct.Struct("<Q")

_MAGIC, _VERSION = b"HiKV", 1
_CHECKSUM = struct.Struct("<HQQ")
_CHECKSUM_OFFSET = 6
_NAME_NBYTES, _PREFIX_NBYTES, _TOKEN_NBYTES, _SERIAL_NBYTES = 40, 24, 8, 7
_PAGE_HASH = re.compile(r"(?:[0-9a-f]{2}){16,64}")


def page_files(
    directory: bytes, prefix: bytes, hashes: Sequence[str]
) -> tuple[list[bytes], list[bytes]]:
    """Return the path of each page's file, and the name in its trailer.

    Args:
        directory: The directory of the key space. A file is in its folder HH, the first two digits.
        prefix: The first 24 bytes of each name. The xxh3-128 of the page hash follows.
        hashes: The page hashes, in lowercase hex.

    Raises:
        ValueError: A page hash is malformed.
    """
    if len(prefix) != _PREFIX_NBYTES:
        raise ValueError("a prefix must have 24 bytes")
    encoded = [_digits(page_hash) for page_hash in hashes]
    paths = [b"%s/%s/%s" % (directory, text[:2], text) for text in encoded]
    return paths, [prefix + xxhash.xxh3_128_digest(text) for text in encoded]


def page_trailers(
    names: Sequence[bytes], synced: bool, token: bytes, serials: Sequence[int]
) -> list[bytes]:
    """Return the trailer for one write of each page.

    Args:
        names: The first 40 bytes of each trailer.
        synced: True if the page is synced to disk before it gets its name.
        token: The token of the writer, 8 bytes.
        serials: A number below 2**56 for each write. No other write of this writer has the same number.
    """
    fits = len(token) == _TOKEN_NBYTES and len(names) == len(serials)
    if not fits or any(len(name) < _NAME_NBYTES for name in names):
        raise ValueError("names, token and serials do not fit together")
    bodies = [
        name[:_NAME_NBYTES] + bytes([synced]) + token + serial.to_bytes(_SERIAL_NBYTES, "little")
        for name, serial in zip(names, serials, strict=True)
    ]
    return [body + xxhash.xxh3_64_digest(body) for body in bodies]


def write_frames(
    headers: Sequence[Buffer],
    hashes: Sequence[str],
    space_id: bytes,
    payload_nbytes: int,
    checksums: Sequence[int] | None,
) -> None:
    """Write the header of each page.

    Args:
        headers: The memory of each header, at least 128 bytes.
        hashes: The page hashes, in lowercase hex.
        space_id: The 16 bytes of the key space's id.
        payload_nbytes: The size of each page.
        checksums: The xxh3-64 of each page. None: frames without a checksum.

    Raises:
        ValueError: A page hash is malformed, or the arguments do not match each other.
    """
    _check_fit(headers, hashes, space_id, checksums)
    for index, (header, page_hash) in enumerate(zip(headers, hashes, strict=True)):
        flags, checksum = (0, 0) if checksums is None else (1, checksums[index])
        view = memoryview(header)
        frame = _frame(page_hash, space_id, payload_nbytes, flags, checksum)
        view[:] = frame.ljust(view.nbytes, b"\0")


def check_frames(
    headers: Sequence[Buffer],
    hashes: Sequence[str],
    space_id: bytes,
    payload_nbytes: int,
    checksums: Sequence[int] | None,
) -> list[int]:
    """Return HIT for each header that `write_frames` would have written, and WRONG for all others.

    Without checksums, the flags and the checksum of a header are not checked.

    Raises:
        ValueError: A page hash is malformed, or the arguments do not match each other.
    """
    _check_fit(headers, hashes, space_id, checksums)
    verdicts: list[int] = []
    for index, (header, page_hash) in enumerate(zip(headers, hashes, strict=True)):
        view = memoryview(header)
        flags, _, found = _CHECKSUM.unpack_from(view, _CHECKSUM_OFFSET)
        if checksums is not None:
            flags, found = 1, checksums[index]
        frame = _frame(page_hash, space_id, payload_nbytes, flags, found)
        verdicts.append(HIT if bytes(view) == frame.ljust(view.nbytes, b"\0") else WRONG)
    return verdicts


def _frame(
    page_hash: str, space_id: bytes, payload_nbytes: int, flags: int, checksum: int
) -> bytes:
    digest = bytes.fromhex(_digits(page_hash).decode())
    fields = FRAME_FIELDS.pack(
        _MAGIC, _VERSION, flags, payload_nbytes, checksum, space_id, len(digest), digest
    )
    return fields + FRAME_SEAL.pack(xxhash.xxh3_64_intdigest(fields))


def _digits(page_hash: str) -> bytes:
    if not _PAGE_HASH.fullmatch(page_hash):
        raise ValueError(f"not a page hash: {page_hash!r}")
    return page_hash.encode()


def _check_fit(
    headers: Sequence[Buffer],
    hashes: Sequence[str],
    space_id: bytes,
    checksums: Sequence[int] | None,
) -> None:
    fits = len(headers) == len(hashes) and len(space_id) == 16
    fits = fits and (checksums is None or len(checksums) == len(headers))
    if not fits or any(memoryview(header).nbytes < FRAME_NBYTES for header in headers):
        raise ValueError("headers, hashes and checksums do not fit together")
