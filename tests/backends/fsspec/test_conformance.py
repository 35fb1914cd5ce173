"""The kit's verdict on `fsspec`, over filesystems of each kind."""

from __future__ import annotations

import importlib
from typing import Any

from hicache_backends.fsspec import FsspecStorage
from hicache_conformance import Scratch, StorageConformance

from hicache_storage.keys import KeySpace

fsspec: Any = importlib.import_module("fsspec")  # it has no types


class TestMemory(StorageConformance):
    """`fsspec` over the memory filesystem: writes are whole, and pages end with the process."""

    storage_class = FsspecStorage
    in_quick_runs = "kv_(00|10|20|40)"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.root = f"/{scratch.prefix}"
        return {"url": f"memory:/{self.root}"}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        filesystem = fsspec.filesystem("memory")
        try:
            return bytes(filesystem.cat_file(f"{self.root}/{space.id}/{page_hash}"))
        except FileNotFoundError:
            return None

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        filesystem = fsspec.filesystem("memory")
        path = f"{self.root}/{space.id}/{page_hash}"
        if data is not None:
            filesystem.pipe_file(path, data)
        elif filesystem.exists(path):
            filesystem.rm_file(path)


class TestLocal(StorageConformance):
    """`fsspec` over the local filesystem: a page is written to another name and renamed atomically."""

    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"url": f"file://{scratch.path}/kv"}


class TestDirect(StorageConformance):
    """`fsspec` with writes in place, as on a filesystem of unknown kind."""

    storage_class = FsspecStorage
    in_quick_runs = "kv_(003|40|50)"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"url": f"file://{scratch.path}/kv", "atomic": "none"}
