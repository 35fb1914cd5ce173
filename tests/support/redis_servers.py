"""The kinds of server that the redis backend is tested with, and clients of theirs that are not ours."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import redis
from hicache_backends.redis.layout import SpaceKeys
from servers import (
    RedisCluster,
    RedisServer,
    TlsRedisServer,
    ValkeyServer,
    program,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
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


class TlsSentinelServer(SentinelServer):
    """A sentinel that reaches its master over TLS, as clients reach it, with a password.

    `is_plain`: clients need neither.
    """

    def __init__(
        self, directory: Path, master: TlsRedisServer, password: str, *, is_plain: bool = False
    ) -> None:
        super().__init__(directory, master.port)
        self._context = ssl.create_default_context(cafile=str(master.authority))
        self._is_plain = is_plain
        files = master.directory
        lines = [
            f"sentinel auth-user {self.master} {master.user}",
            f'sentinel auth-pass {self.master} "{master.password}"',
            f"tls-ca-cert-file {files / 'ca.crt'}",
            f"tls-cert-file {files / 'server.crt'}",
            f"tls-key-file {files / 'server.key'}",
            "tls-auth-clients no",
            "tls-replication yes",
            *([] if is_plain else [f'requirepass "{password}"']),
        ]
        self._file.write_text(self._file.read_text() + "\n".join(lines) + "\n")

    def command(self) -> list[str]:
        port = ["--port", str(self.port)]
        if not self._is_plain:
            port = ["--port", "0", "--tls-port", str(self.port)]
        server = program(*self.programs)
        return [server, str(self._file), "--sentinel", *port, "--bind", "127.0.0.1"]

    def connected(self) -> socket.socket:
        plain = super().connected()
        if self._is_plain:
            return plain
        return self._context.wrap_socket(plain, server_hostname="localhost")


class OtherHostServer(TlsRedisServer):
    """A TLS server whose certificate, of the same authority, names another host."""

    host = "other.example"

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, *options)
        (directory / "names").write_text(f"subjectAltName=DNS:{self.host}\n")
        signing = "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2"
        subprocess.run(
            [program("openssl"), *signing.split(), "-out", "server.crt", "-extfile", "names"],
            cwd=directory,
            check=True,
            capture_output=True,
        )

    def connected(self) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.authority))
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=1)
        return context.wrap_socket(plain, server_hostname=self.host)


class RespServer:
    """A server that answers as a test says: bytes to send, or None for silence.

    with RespServer(lambda command: b"+OK\\r\\n") as server:
        RedisStorage.from_config({"url": server.url})
    """

    def __init__(self, answer: Callable[[list[bytes]], bytes | None]) -> None:
        self.seen: list[list[bytes]] = []
        """The commands that came."""
        self.raw = bytearray()
        """Everything that came."""
        self.answer: Callable[[list[bytes]], bytes | None] = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in (self._listener, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in (self._listener, *self._connections):
            one.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        unread = b""
        with suppress(OSError):
            while came := connection.recv(1 << 16):
                self.raw += came
                unread += came
                while parsed := _command_of(unread):
                    command, unread = parsed
                    self.seen.append(command)
                    reply = self.answer(command)
                    if reply is not None:
                        connection.sendall(reply)


def _command_of(data: bytes) -> tuple[list[bytes], bytes] | None:
    """The first command of `data` and what follows it; None: it is not there yet, or is none."""
    header, found, rest = data.partition(b"\r\n")
    if not found or not header[1:].isdigit():
        return None
    command: list[bytes] = []
    for _ in range(int(header[1:])):
        length, found, rest = rest.partition(b"\r\n")
        if not found or len(rest) < int(length[1:]) + 2:
            return None
        command.append(rest[: int(length[1:])])
        rest = rest[int(length[1:]) + 2 :]
    return command, rest


def bulk(data: bytes) -> bytes:
    """A string as a server sends it."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def array(*items: bytes) -> bytes:
    """An array of replies."""
    return b"*%d\r\n%b" % (len(items), b"".join(items))


def usual(command: list[bytes], *, is_cluster: bool = False) -> bytes:
    """What an empty server says."""
    facts = b"maxmemory_policy:noeviction\r\nevicted_keys:0\r\ncluster_enabled:%d\r\n"
    nothing_more = array(bulk(b"0"), array())
    told = {
        b"INFO": bulk(facts % is_cluster),
        b"GET": b"$-1\r\n",
        b"HVALS": array(),
        b"STRLEN": b":0\r\n",
        b"SCAN": nothing_more,
        b"ZSCAN": nothing_more,
        **dict.fromkeys((b"HSETNX", b"ZADD", b"UNLINK", b"ZREMRANGEBYSCORE"), b":1\r\n"),
    }
    if [part.upper() for part in command[:2]] == [b"CLIENT", b"INFO"]:
        return bulk(b"id=1 addr=127.0.0.1:1")
    return told.get(command[0].upper(), b"+OK\r\n")


def slots(*parts: tuple[int, int, int]) -> bytes:
    """A map of a cluster on this host: first and last slot, and the port, of each server."""
    return array(
        *(
            array(
                b":%d\r\n" % first, b":%d\r\n" % last, array(bulk(b"127.0.0.1"), b":%d\r\n" % port)
            )
            for first, last, port in parts
        )
    )


@contextmanager
def hole(*hosts: str) -> Generator[int, None, None]:
    """A port where connections are neither made nor refused: the queue of its listener is full."""
    with ExitStack() as stack:
        port = 0
        for host in hosts or ("127.0.0.1",):
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            port = listener.getsockname()[1]
            listener.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex((host, port))
        yield port
