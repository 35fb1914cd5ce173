"""Runs the kit on SpoolCache's token files: `make field-spoolcache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from field.vllm.spoolcache import SpoolCache
from hicache_conformance import StorageConformance
from page_files import FileSubject

if TYPE_CHECKING:
    from hicache_storage import KeySpace


class TestSpoolCache(FileSubject, StorageConformance):
    """`TokenFileStore` with its defaults. The back doors leave out the header of a file."""

    storage_class = files = SpoolCache
    absent = SpoolCache.absent

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super().peek(space, page_hash)
        return data if data is None else data[_header_nbytes(data) :]

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        before = super().peek(space, page_hash)
        if data is not None and before is not None:
            data = before[: _header_nbytes(before)] + data
        super().tamper(space, page_hash, data)


def _header_nbytes(data: bytes) -> int:
    """Return the size of the frame (8 + 4 + 32 bytes) with the JSON whose size it holds."""
    return 44 + int.from_bytes(data[8:12], "little")
