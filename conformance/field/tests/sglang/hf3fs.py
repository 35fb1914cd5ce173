"""Runs the kit on SGLang's 3FS backend over its mock client: `make field-sglang-hf3fs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from field.sglang.hf3fs import SGLangHF3FS
from hicache_conformance import Scratch, StorageConformance

if TYPE_CHECKING:
    from collections.abc import Mapping


class TestSGLangHF3FS(StorageConformance):
    """`HiCacheHF3FS` with `Hf3fsMockClient` and metadata in the process, its mode for one machine."""

    storage_class = SGLangHF3FS
    absent = SGLangHF3FS.absent

    def config(self, scratch: Scratch) -> Mapping[str, Any]:
        return {"path": str(scratch.path)}
