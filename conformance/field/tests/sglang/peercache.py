"""Runs the kit on PeerCache's SGLang backend, over its storage server: `make field-peercache`."""

from __future__ import annotations

import json
import sys
from typing import Any

from field.sglang.peercache import PeerCache
from hicache_conformance import Scratch, StorageConformance
from servers import ServerProcess
from shared_server import OnSharedServer

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


class TestPeerCache(OnSharedServer[PeerCacheServer], StorageConformance):
    """`PeerCacheStore` with its defaults. The tests share a server, except those that stop it."""

    storage_class = PeerCache
    absent = PeerCache.absent
    server_class = PeerCacheServer

    def config(self, scratch: Scratch) -> dict[str, Any]:
        own = {
            "discovery_addr": f"127.0.0.1:{self.running.port}",
            "mode": "centralized",
            "role": "inference",
            "disk_enabled": False,
            "prefix": scratch.prefix,
        }
        return {"extra_config": _LOOPBACK | own}
