"""The kinds of server that the redis backend is tested with, and clients of theirs that are not ours."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import redis
from hicache_backends.redis._keys import SpaceKeys
from servers import (
    RedisCluster,
    RedisServer,
    TlsRedisServer,
    ValkeyServer,
    program,
    wait_until,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hicache_storage.keys import KeySpace

_redis: Any = redis  # untyped
AnyServer: TypeAlias = RedisServer | RedisCluster


@dataclass(frozen=True)
class Kind:
    """One kind of server."""

    name: str
    server_class: type[RedisServer | RedisCluster]
    options: tuple[str, ...] = ()

    def start(self, directory: Path) -> AbstractContextManager[AnyServer]:
        return self.server_class(directory, *self.options)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("redis", RedisServer),
        Kind("small", RedisServer, ("--maxmemory", "2500kb")),
        Kind("valkey", ValkeyServer),
        Kind("cluster", RedisCluster),
        Kind("tls", TlsRedisServer),
    )
}


def config_of(server: AnyServer) -> dict[str, Any]:
    """The config that opens a storage on `server`."""
    if isinstance(server, TlsRedisServer):
        return {
            "url": f"rediss://localhost:{server.port}",
            "username": server.user,
            "password": server.password,
            "tls_ca_file": str(server.authority),
        }
    return {"url": server.url}


def client_of(server: AnyServer) -> AbstractContextManager[Any]:
    """redis-py's own client."""
    if isinstance(server, RedisCluster):
        return closing(_redis.RedisCluster.from_url(server.url))
    if isinstance(server, TlsRedisServer):
        client = redis.Redis(
            port=server.port,
            username=server.user,
            password=server.password,
            ssl=True,
            ssl_ca_certs=str(server.authority),
        )
        return closing(client)
    return closing(client_of_one(server))


def client_of_one(server: RedisServer) -> Any:
    """Of one server, be it one of a cluster; it may be left to be collected."""
    return _redis.Redis.from_url(server.url)


def stored(server: AnyServer, prefix: str, space: KeySpace, page_hash: str) -> bytes | None:
    """What lies under the key of a page."""
    with client_of(server) as client:
        return cast("bytes | None", client.get(SpaceKeys(prefix, space).page(page_hash)))


def put(
    server: AnyServer, prefix: str, space: KeySpace, page_hash: str, data: bytes | None
) -> None:
    """Lay something else there; None: nothing."""
    key = SpaceKeys(prefix, space).page(page_hash)
    with client_of(server) as client:
        if data is None:
            client.delete(key)
        else:
            client.set(key, data)


class SentinelServer(RedisServer):
    """A sentinel that watches one master alone."""

    master = "pages"

    def __init__(self, directory: Path, master_port: int) -> None:
        super().__init__(directory)
        self._file = directory / "sentinel.conf"
        self._file.write_text(
            f"sentinel monitor {self.master} 127.0.0.1 {master_port} 1\n"
            f"sentinel down-after-milliseconds {self.master} 500\n"
            f"sentinel failover-timeout {self.master} 3000\n"
        )

    def command(self) -> list[str]:
        address = ["--port", str(self.port), "--bind", "127.0.0.1"]
        return [program(*self.programs), str(self._file), "--sentinel", *address]

    def wait_until_it_knows_a_replica(self) -> None:
        with closing(_redis.Redis(port=self.port)) as sentinel:
            wait_until(lambda: bool(sentinel.sentinel_slaves(self.master)))
