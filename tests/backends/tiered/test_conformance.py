"""The kit's verdict on `tiered`, over the compositions that people run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from composed_stores import file_member, memory_member, read_file, write_files
from hicache_backends.tiered import TieredStorage
from hicache_conformance import Scratch, StorageConformance
from redis_servers import KINDS, AnyServer, config_of, put, stored
from s3_kit import S3Conformance
from servers import Rclone

from hicache_storage.keys import KeySpace


class TestFileOverRedis(StorageConformance):
    """A disk above a server for the rack, written through."""

    storage_class = TieredStorage
    in_quick_runs = "kv_(00[27]|301|40[134])"
    kind = KINDS["redis"]
    running: AnyServer

    @pytest.fixture(autouse=True)
    def _start(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with self.kind.start(tmp_path_factory.mktemp("server")) as self.running:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self.roots = [scratch.path / "disk"]
        self.prefix = f"{scratch.prefix}:"
        server = {**config_of(self.running), "prefix": self.prefix}
        return {
            "tiers": [
                file_member("disk", self.roots[0]),
                {"name": "rack", "backend": "redis", "config": server},
            ]
        }

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        below = stored(self.running, self.prefix, space, page_hash)
        return read_file(self.roots, space, page_hash) or below

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_files(self.roots, space, page_hash, data)
        put(self.running, self.prefix, space, page_hash, data)


class OverS3(S3Conformance):
    """Tiers above a bucket. They answer without it, so nothing stops it."""

    server = cast("Any", StorageConformance.server)


class MemoryOverS3(OverS3):
    """Memory above a bucket."""

    server_class = Rclone
    write = "through"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        bucket = {"name": "bucket", "backend": "s3", "config": super().config(scratch)}
        return {"tiers": [memory_member("memory"), bucket], "write": self.write}


class TestThrough(MemoryOverS3):
    """A set reaches the bucket before it returns."""

    storage_class = TieredStorage
    in_quick_runs = "kv_(00[25]|205)"


class TestBack(MemoryOverS3):
    """A set reaches the bucket later."""

    storage_class = TieredStorage
    in_quick_runs = "kv_00[267]"
    write = "back"


class TestStripesOverS3(OverS3):
    """Two disks as one tier, above a bucket."""

    storage_class = TieredStorage
    server_class = Rclone
    in_quick_runs = "kv_(00[23]|40[34])"

    def config(self, scratch: Scratch) -> dict[str, Any]:
        bucket = {"name": "bucket", "backend": "s3", "config": super().config(scratch)}
        self.roots = [scratch.path / name for name in "ab"]
        stripes = {"stripes": [file_member(root.name, root) for root in self.roots]}
        nvme = {"name": "nvme", "backend": "striped", "config": stripes}
        return {"tiers": [nvme, bucket]}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_file(self.roots, space, page_hash) or super().peek(space, page_hash)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_files(self.roots, space, page_hash, data)
        super().tamper(space, page_hash, data)
