"""Back doors for the kit to pages that another engine's store keeps as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from hicache_conformance import Scratch
from hicache_conformance.run.subject import Subject

from hicache_storage import KeySpace


class _Files(Protocol):
    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self: ...
    def path_of(self, space: KeySpace, page_hash: str) -> Path: ...
    def close(self) -> None: ...


class FileSubject(Subject):
    """A subject with a directory for each test, whose back doors read and write its files."""

    files: ClassVar[type[_Files]]
    """The adapter class, which returns the file of a page."""

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.fields: dict[str, Any] = {"path": str(scratch.path)}
        return self.fields

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        path = self._file(space, page_hash)
        return path.read_bytes() if path.is_file() else None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        path = self._file(space, page_hash)
        if data is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(data)

    def _file(self, space: KeySpace, page_hash: str) -> Path:
        store = self.files.from_config(self.fields)
        try:
            return store.path_of(space, page_hash)
        finally:
            store.close()


class PaddedFileSubject(FileSubject):
    """A subject whose files are pages padded to whole blocks. The back doors leave out the padding.

    A file that is too short for all its blocks has no padding. Bytes that follow the last block
    are returned after the bytes of the page.
    """

    alignment: ClassVar[int]

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super().peek(space, page_hash)
        nbytes, padded_nbytes = self._sizes(space)
        if data is None or len(data) < padded_nbytes:
            return data
        return data[:nbytes] + data[padded_nbytes:]

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        nbytes, padded_nbytes = self._sizes(space)
        if data is not None and len(data) >= nbytes:
            data = data[:nbytes] + bytes(padded_nbytes - nbytes) + data[nbytes:]
        super().tamper(space, page_hash, data)

    def _sizes(self, space: KeySpace) -> tuple[int, int]:
        nbytes = space.stored_nbytes
        return nbytes, -(-nbytes // self.alignment) * self.alignment
