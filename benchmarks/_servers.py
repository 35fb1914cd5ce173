"""The servers of the benchmarks: the servers that tests use, and one that only moves bytes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))

import servers

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

__all__ = [
    "REDIS",
    "TlsRedisServer",
    "ministack",
    "mooncake_master",
    "null_server",
    "null_servers",
    "redis_server",
    "servers",
]
REDIS = {"redis-server": servers.RedisServer, "valkey-server": servers.ValkeyServer}


class TlsRedisServer(servers.RedisServer):
    """A Redis that accepts only TLS, without a password."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        servers.make_certificates(directory)

    def command(self) -> list[str]:
        tls = f"--port 0 --tls-port {self.port} --tls-auth-clients no --tls-ca-cert-file ca.crt"
        files = "--tls-cert-file server.crt --tls-key-file server.key"
        return [*super().command(), *tls.split(), *files.split()]

    def answers(self) -> bool:
        self.connected().close()
        return True


def mooncake_master(directory: Path) -> servers.MooncakeMaster:
    """Return a master whose objects have Mooncake's default leases, not the short ones of tests."""
    return servers.MooncakeMaster(directory, "--default_kv_lease_ttl=5000ms")


class Ministack(servers.Ministack):
    """A server with S3's semantics that stores objects in memory."""

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), "S3_PERSIST": "0"}


@contextmanager
def redis_server(name: str = "redis-server") -> Generator[int, None, None]:
    """Run a server without persistence. Yield its port."""
    with tempfile.TemporaryDirectory() as directory, REDIS[name](Path(directory)) as server:
        yield server.port


@contextmanager
def ministack() -> Generator[int, None, None]:
    """Run a server with S3's semantics. Yield its port."""
    with tempfile.TemporaryDirectory() as directory, Ministack(Path(directory)) as server:
        yield server.port


@contextmanager
def null_server() -> Generator[int, None, None]:
    """Run a server that only moves bytes. Yield its port."""
    with null_servers() as (port,):
        yield port


@contextmanager
def null_servers(certificates: Path | None = None) -> Generator[list[int], None, None]:
    """Run a server that only moves bytes.

    Yield its port and, if there are `certificates`, its TLS port.
    """
    files = [certificates / name for name in ("server.crt", "server.key")] if certificates else []
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("_null_server.py"), *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield [int(port) for port in process.stdout.readline().split()]
        process.stdin.close()
