"""The kit on SGLang's file backend, as it is in its wheel: `make field-sglang-file`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance import Scratch, StorageConformance
from hicache_conformance.field.sglang_file import SGLangFile

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage import KeySpace


class TestSGLangFile(StorageConformance):
    """`HiCacheFile` without its evictor and its metadata cache: its defaults."""

    storage_class = SGLangFile
    absent = SGLangFile.absent

    def config(self, scratch: Scratch) -> dict[str, str]:
        self.fields = {"path": str(scratch.path)}
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
        with SGLangFile.from_config(self.fields) as store:
            return store.path_of(space, page_hash)
