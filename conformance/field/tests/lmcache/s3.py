"""Runs the kit on LMCache's `s3` adapter, with a ministack for each test: `make field-lmcache-s3`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.lmcache.s3 import LMCacheS3
from hicache_conformance import Scratch, StorageConformance
from s3_kit import BucketHost, read_object, write_object
from scratch_servers import ScratchServers

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from hicache_storage import KeySpace


class TestLMCacheS3(StorageConformance):
    """`S3L2Adapter` with its defaults, but without TLS. Each scratch has a server with one bucket."""

    storage_class = LMCacheS3
    absent = LMCacheS3.absent
    servers: ClassVar[ScratchServers[BucketHost]]
    served: BucketHost

    @pytest.fixture(autouse=True)
    def _servers(self, tmp_path: Path) -> Generator[None, None, None]:
        with ScratchServers(BucketHost, tmp_path) as type(self).servers:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        if not hasattr(self, "own"):
            self.served = self.servers.of(scratch.prefix)
        return self.served.config

    @contextmanager
    def server(self) -> Generator[BucketHost, None, None]:
        with BucketHost(self.servers.directory / "own") as self.own:
            self.served = self.own
            yield self.own

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_object(self.served, self._object(space, page_hash), BucketHost.bucket)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_object(self.served, self._object(space, page_hash), data, BucketHost.bucket)

    def _object(self, space: KeySpace, page_hash: str) -> str:
        with LMCacheS3.from_config(self.served.config) as store:
            return store.object_of(space, page_hash)
