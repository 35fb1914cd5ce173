"""Runs the kit on PeerCache's SGLang backend, over its storage server: `make field-peercache`."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from field.sglang.peercache import PeerCache
from hicache_conformance import Scratch, StorageConformance
from servers import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

_LOOPBACK = {
    "local_hostname": "127.0.0.1",
    "rdma_bind_host": "127.0.0.1",
    "control_bind_host": "127.0.0.1",
    "meta_bind_host": "127.0.0.1",
    "protocol": "tcp",
    "metrics_enabled": False,
}
_PROGRAM = """
import json, sys
from peercache.config import PeerCacheConfig
from peercache.storage_server import StorageServer
server = StorageServer(PeerCacheConfig(**json.loads(sys.argv[1])))
print("ready", flush=True)
server.run_forever()
"""


class PeerCacheServer(ServerProcess):
    """`peercache-storage-server` on loopback, with 512 MB of memory and no disk."""

    ready_limit_s = 120.0  # it imports torch

    def command(self) -> list[str]:
        fields = _LOOPBACK | {
            "discovery_addr": f"127.0.0.1:{self.port}",
            "role": "storage",
            "global_segment_size": "512mb",
            "disk_enabled": False,
        }
        return [sys.executable, "-c", _PROGRAM, json.dumps(fields)]

    def answers(self) -> bool:
        return "ready" in self.log.read_text(errors="replace")


class TestPeerCache(StorageConformance):
    """`PeerCacheStore` with its defaults. The tests share a server, except those that stop it."""

    storage_class = PeerCache
    absent = PeerCache.absent
    directories: ClassVar[pytest.TempPathFactory]
    shared_server: ClassVar[PeerCacheServer]
    own_server: PeerCacheServer | None = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
        cls.directories = tmp_path_factory
        with PeerCacheServer(cls._directory()) as cls.shared_server:
            yield

    def config(self, scratch: Scratch) -> dict[str, Any]:
        server = self.own_server or self.shared_server
        own = {
            "discovery_addr": f"127.0.0.1:{server.port}",
            "mode": "centralized",
            "role": "inference",
            "disk_enabled": False,
            "prefix": scratch.prefix,
        }
        return {"extra_config": _LOOPBACK | own}

    @contextmanager
    def server(self) -> Generator[PeerCacheServer, None, None]:
        with PeerCacheServer(self._directory()) as self.own_server:
            yield self.own_server

    @classmethod
    def _directory(cls) -> Path:
        return cls.directories.mktemp("peercache")
