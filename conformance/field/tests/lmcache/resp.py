"""Runs the kit on LMCache's `resp` adapter, with a Redis for each test: `make field-lmcache-resp`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import redis
from field.lmcache.resp import LMCacheResp
from hicache_conformance import Scratch, StorageConformance
from scratch_servers import ScratchServers
from servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from hicache_storage import KeySpace


class TestLMCacheResp(StorageConformance):
    """`LMCacheRedisClient` with its defaults: eight threads, each with a connection."""

    storage_class = LMCacheResp
    absent = LMCacheResp.absent
    servers: ClassVar[ScratchServers[RedisServer]]
    fields: dict[str, Any]

    @pytest.fixture(autouse=True)
    def _servers(self, tmp_path: Path) -> Generator[None, None, None]:
        with ScratchServers(RedisServer, tmp_path) as type(self).servers:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        if not hasattr(self, "own"):
            self.fields = {"host": "127.0.0.1", "port": self.servers.of(scratch.prefix).port}
        return self.fields

    @contextmanager
    def server(self) -> Generator[RedisServer, None, None]:
        with RedisServer(self.servers.directory / "own") as self.own:
            self.fields = {"host": "127.0.0.1", "port": self.own.port}
            yield self.own

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        with self._client() as client:
            found: bytes | None = client.get(self._key(space, page_hash))
            return found

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        with self._client() as client:
            if data is None:
                client.delete(self._key(space, page_hash))
            else:
                client.set(self._key(space, page_hash), data)

    def _client(self) -> Any:
        port: int = self.fields["port"]
        return redis.Redis(port=port)

    def _key(self, space: KeySpace, page_hash: str) -> str:
        with LMCacheResp.from_config(self.fields) as store:
            return store.key_of(space, page_hash)
