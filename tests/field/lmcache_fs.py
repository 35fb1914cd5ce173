"""The kit on LMCache's two file adapters, as in its wheel: `make field-lmcache-fs`, `-fs-native`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hicache_conformance import Scratch, StorageConformance
from hicache_conformance.field.lmcache_fs import LMCacheFiles, LMCacheFs, LMCacheFsNative
from hicache_conformance.subject import Subject

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage import KeySpace


class InFiles(Subject):
    """A directory a test, its files as back doors."""

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
        storage_class = cast("type[LMCacheFiles]", self.storage_class)
        with storage_class.from_config(self.fields) as store:
            return store.path_of(space, page_hash)


class TestLMCacheFs(InFiles, StorageConformance):
    """`FSL2Adapter` by its defaults: no O_DIRECT, temporary files beside the others."""

    storage_class = LMCacheFs
    absent = LMCacheFs.absent


class TestLMCacheFsNative(InFiles, StorageConformance):
    """`LMCacheFSClient` by its defaults: four threads, no O_DIRECT, no read-ahead."""

    storage_class = LMCacheFsNative
    absent = LMCacheFsNative.absent
