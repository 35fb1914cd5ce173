"""Runs the kit on OpenLake's client, with a daemon of its own: `make field-openlake`."""

from __future__ import annotations

import socket
from importlib import resources
from pathlib import Path
from typing import Any

from field.vllm.openlake import OpenLake
from hicache_conformance import Scratch, StorageConformance
from servers import ServerProcess, free_port
from shared_server import OnSharedServer

_CONFIG = """\
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{port}"
kv_agents = ["127.0.0.1:{port}"]
s3_addr = "127.0.0.1:{s3_port}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1

[[credentials]]
access_key = "openlake"
secret_key = "openlake"

[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{port}"
disk_count = 0

[kv_slab]
capacity_gb = 1
reserve_ttl_secs = 60
"""


class OpenLakeServer(ServerProcess):
    """`openlaked` of the wheel with its own configuration, on loopback, with a slab of 1 GiB."""

    def command(self) -> list[str]:
        daemon = Path(str(resources.files("openlake_client") / "openlaked"))
        daemon.chmod(0o755)
        config = self.directory / "config.toml"
        config.write_text(_CONFIG.format(port=self.port, s3_port=free_port()))
        return [str(daemon), "--config", str(config)]

    def stop(self) -> None:
        """Kill the daemon, and remove the shared memory that a killed one leaves."""
        left = Path(f"/dev/shm/openlake_kv_{self.pid}_0") if self._process else None
        super().stop()
        if left:
            left.unlink(missing_ok=True)

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True


class TestOpenLake(OnSharedServer[OpenLakeServer], StorageConformance):
    """`openlake_client.Client`. The tests share a daemon, except those that stop it."""

    storage_class = OpenLake
    absent = OpenLake.absent
    server_class = OpenLakeServer

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"nodes": [f"127.0.0.1:{self.running.port}"], "cache_prefix": scratch.prefix}
