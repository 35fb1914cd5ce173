"""Servers for the tests of the redis backend, real and scripted, and redis-py clients for them."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import redis
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.layout import SpaceKeys
from pages import blank, hash_of, page
from servers import (
    RedisCluster,
    RedisServer,
    TlsRedisServer,
    ValkeyServer,
    make_certificates,
    program,
    wait_until,
)

from hicache_storage.keys import KeySpace
from hicache_storage.page import Page

_redis: Any = redis  # it has no types
AnyServer: TypeAlias = RedisServer | RedisCluster
PREFIX = "test:"
"""The prefix of keys in tests that open a storage with `open_on`."""


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
    """Return the config that opens a storage on `server`."""
    if isinstance(server, TlsRedisServer):
        return {
            "url": f"rediss://localhost:{server.port}",
            "username": server.user,
            "password": server.password,
            "tls_ca_file": str(server.authority),
        }
    return {"url": server.url}


def client_of(server: AnyServer) -> AbstractContextManager[Any]:
    """Return redis-py's own client for `server`."""
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
    """Return a client for one server, which may belong to a cluster. It need not be closed."""
    return _redis.Redis.from_url(server.url)


def stored(server: AnyServer, prefix: str, space: KeySpace, page_hash: str) -> bytes | None:
    """Return the value under the key of a page."""
    with client_of(server) as client:
        return cast("bytes | None", client.get(SpaceKeys(prefix, space.id).page(page_hash)))


def put(
    server: AnyServer, prefix: str, space: KeySpace, page_hash: str, data: bytes | None
) -> None:
    """Set the value under the key of a page, or delete it if the value is None."""
    key = SpaceKeys(prefix, space.id).page(page_hash)
    with client_of(server) as client:
        if data is None:
            client.delete(key)
        else:
            client.set(key, data)


def open_on(server: AnyServer, **config: Any) -> RedisStorage:
    """Open a storage on `server`, with the prefix of the tests."""
    return RedisStorage.from_config({**config_of(server), "prefix": PREFIX, **config})


def hashes_of(count: int, start: int = 0) -> list[str]:
    return [hash_of(number) for number in range(start, start + count)]


def pages_of(count: int, nbytes: int = 4096) -> list[Page]:
    return [page(nbytes, seed) for seed in range(count)]


def must_get(storage: RedisStorage, key_space: KeySpace, hashes: list[str]) -> list[bytes]:
    pages = [blank(key_space.stored_nbytes) for _ in hashes]
    assert [True] * len(hashes) == storage.batch_get(key_space, hashes, pages)
    return [one.tobytes() for one in pages]


class SentinelServer(RedisServer):
    """A sentinel that watches one master. There are no other sentinels."""

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

    def wait_for_replica(self) -> None:
        with closing(_redis.Redis(port=self.port)) as sentinel:
            wait_until(lambda: bool(sentinel.sentinel_slaves(self.master)))


class TlsSentinelServer(SentinelServer):
    """A sentinel that clients reach over TLS with a password, as it reaches its master.

    With `is_plain`, clients need neither TLS nor a password.
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
    """A TLS server whose certificate is from the same authority, but names another host."""

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


class _TcpServer(ABC):
    """A server on a free port of this host, with a thread for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @abstractmethod
    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it ends."""

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for one in self._sockets:
            one.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._sockets.append(connection)
                self._start(self._serve, connection)


class TlsListener(_TcpServer):
    """A server of any protocol over TLS, with a certificate for one host, that ends after `days`."""

    def __init__(self, directory: Path, host: str = "localhost", days: int = 2) -> None:
        super().__init__()
        make_certificates(directory)
        (directory / "names").write_text(f"subjectAltName=DNS:{host}\n")
        signing = f"x509 -req -in server.csr -CA ca.crt -CAkey ca.key -days {days}"
        subprocess.run(
            [program("openssl"), *signing.split(), "-out", "server.crt", "-extfile", "names"],
            cwd=directory,
            check=True,
            capture_output=True,
        )
        self.authority = directory / "ca.crt"
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(directory / "server.crt", directory / "server.key")

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self._context.wrap_socket(connection, server_side=True)


class Forwarder(_TcpServer):
    """An address that forwards connections to `target_port`, which a test may change."""

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self.target_port = target_port

    def _serve(self, connection: socket.socket) -> None:
        target = socket.create_connection(("127.0.0.1", self.target_port))
        self._sockets.append(target)
        self._start(_copy, target, connection)
        _copy(connection, target)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class RespServer(_TcpServer):
    """A server whose replies a test chooses. None means no reply.

    with RespServer(lambda command: b"+OK\r\n") as server:
        RedisStorage.from_config({"url": server.url})
    """

    def __init__(self, answer: Callable[[list[bytes]], bytes | None]) -> None:
        super().__init__()
        self.commands: list[list[bytes]] = []
        """The commands that the server has received."""
        self.raw = bytearray()
        """All bytes that the server has received."""
        self.answer: Callable[[list[bytes]], bytes | None] = answer

    def _serve(self, connection: socket.socket) -> None:
        unread = b""
        with suppress(OSError):
            while received := connection.recv(1 << 16):
                self.raw += received
                unread += received
                while parsed := _parse_command(unread):
                    command, unread = parsed
                    self.commands.append(command)
                    reply = self.answer(command)
                    if reply is not None:
                        connection.sendall(reply)


def _parse_command(data: bytes) -> tuple[list[bytes], bytes] | None:
    """Return the first command of `data` and the rest, or None if it is incomplete or not a command."""
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
    """Return a string as a server sends it."""
    return b"$%d\r\n%b\r\n" % (len(data), data)


def array(*items: bytes) -> bytes:
    """Return an array of replies as a server sends it."""
    return b"*%d\r\n%b" % (len(items), b"".join(items))


def empty_reply(command: list[bytes], *, is_cluster: bool = False) -> bytes:
    """Return the reply of an empty server."""
    facts = b"maxmemory_policy:noeviction\r\nevicted_keys:0\r\ncluster_enabled:%d\r\n"
    last_part = array(bulk(b"0"), array())
    replies = {
        b"INFO": bulk(facts % is_cluster),
        b"GET": b"$-1\r\n",
        b"HVALS": array(),
        b"STRLEN": b":0\r\n",
        b"SCAN": last_part,
        b"ZSCAN": last_part,
        **dict.fromkeys((b"HSETNX", b"ZADD", b"UNLINK", b"ZREMRANGEBYSCORE"), b":1\r\n"),
    }
    if [part.upper() for part in command[:2]] == [b"CLIENT", b"INFO"]:
        return bulk(b"id=1 addr=127.0.0.1:1")
    return replies.get(command[0].upper(), b"+OK\r\n")


def slots(*parts: tuple[int, int, int]) -> bytes:
    """Return CLUSTER SLOTS for servers on this host, each with its first slot, last slot and port."""
    return array(
        *(
            array(
                b":%d\r\n" % first, b":%d\r\n" % last, array(bulk(b"127.0.0.1"), b":%d\r\n" % port)
            )
            for first, last, port in parts
        )
    )


@contextmanager
def unreachable_port(*hosts: str) -> Generator[int, None, None]:
    """Yield a port that neither accepts nor refuses connections: its listener's queue is full."""
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
