"""Runs the kit on Redhare's client, with a Redis of its own: `make field-redhare`."""

from __future__ import annotations

from typing import Any

from field.vllm.redhare import Redhare
from hicache_conformance import Scratch, StorageConformance
from servers import RedisServer
from shared_server import OnSharedServer


class TestRedhare(OnSharedServer[RedisServer], StorageConformance):
    """`redhare.KvStore` without a cold tier. The tests share a Redis, except those that stop it."""

    storage_class = Redhare
    absent = Redhare.absent
    server_class = RedisServer

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"redis_url": self.running.url, "cluster": scratch.prefix}
