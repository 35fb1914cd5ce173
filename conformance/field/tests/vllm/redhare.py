"""Runs the kit on Redhare's client, with a Redis of its own: `make field-redhare`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.vllm.redhare import Redhare
from hicache_conformance import Scratch, StorageConformance
from servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Generator


class TestRedhare(StorageConformance):
    """`redhare.KvStore` without a cold tier. The tests share a Redis, except those that stop it."""

    storage_class = Redhare
    absent = Redhare.absent
    directories: ClassVar[pytest.TempPathFactory]
    shared_server: ClassVar[RedisServer]
    own_server: RedisServer | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with RedisServer(tmp_path_factory.mktemp("redis")) as cls.shared_server:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        server = self.own_server or self.shared_server
        return {"redis_url": server.url, "cluster": scratch.prefix}

    @contextmanager
    def server(self) -> Generator[RedisServer, None, None]:
        with RedisServer(self.directories.mktemp("redis")) as self.own_server:
            yield self.own_server
