"""The kit's verdict on the redis backend, on every kind of server, with real servers that are stopped.

make conformance-redis        # the reports are then in artifacts/
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from hicache_backends.redis import RedisStorage
from hicache_conformance import Scratch, StorageConformance
from hicache_conformance.run.subject import Subject
from redis_servers import KINDS, AnyServer, Kind, config_of, put, stored

from hicache_storage.keys import KeySpace


class OnOneServer(Subject):
    """One server for all tests of a class. Each test has its own key prefix."""

    storage_class = RedisStorage
    kind: ClassVar[Kind]
    shared_server: ClassVar[AnyServer]
    directories: ClassVar[pytest.TempPathFactory]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with cls.kind.start(cls.directories.mktemp("shared")) as cls.shared_server:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        self._server = getattr(self, "_own_server", self.shared_server)
        self._prefix = f"{scratch.prefix}:"
        return {**config_of(self._server), "prefix": self._prefix}

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return stored(self._server, self._prefix, space, page_hash)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        put(self._server, self._prefix, space, page_hash, data)

    @contextmanager
    def server(self) -> Generator[AnyServer, None, None]:
        with self.kind.start(self.directories.mktemp("own")) as self._own_server:
            yield self._own_server


class TestRedis(OnOneServer, StorageConformance):
    kind = KINDS["redis"]


class TestSmall(OnOneServer, StorageConformance):
    """A server with memory for some dozens of pages. Most checks need more."""

    kind = KINDS["small"]
    concerns = "kv_006"


class TestValkey(OnOneServer, StorageConformance):
    kind = KINDS["valkey"]
    in_quick_runs = "kv_(003|103|204|403)"


class TestCluster(OnOneServer, StorageConformance):
    kind = KINDS["cluster"]
    in_quick_runs = "kv_(003|103|305|403)"


class TestTls(OnOneServer, StorageConformance):
    kind = KINDS["tls"]
    in_quick_runs = "kv_(003|304|305)"
