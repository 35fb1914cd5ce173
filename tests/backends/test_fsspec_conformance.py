"""The kit's verdict on `fsspec`, over the filesystems that need no server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
from hicache_backends.fsspec import FsspecStorage
from hicache_backends.fsspec._page_object import packed, unpacked
from hicache_conformance import Scratch, StorageConformance
from hicache_storage.page import Page

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace


class FsspecConformance(StorageConformance):
    """Pages are peeked at and tampered with by another instance of the filesystem."""

    __test__ = False
    url: str
    storage_options: dict[str, Any] = {}

    def path(self, space, page_hash):
        return f"{self.url}/{space.id}/{page_hash}"


class TestMemory(StorageConformance):
    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.url = f"memory://{scratch.prefix}"
        return {"url": self.url}


class TestLocal(StorageConformance):
    storage_class = FsspecStorage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"url": f"file://{scratch.path}/kv"}
