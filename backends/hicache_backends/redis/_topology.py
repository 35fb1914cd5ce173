"""Which server has which keys: one server, the master that sentinels name, or a cluster."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import redis.sentinel
from redis import exceptions
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from hicache_backends.redis._node import Node
from hicache_backends.redis._replies import FAILURES, ErrorReply, Refused
from hicache_backends.redis._settings import address
from hicache_backends.redis._wire import TcpConnection, TlsConnection, UnixConnection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_backends.redis._replies import Reply
    from hicache_backends.redis._settings import RedisSettings
    from hicache_backends.redis._wire import Deadline

_SLOTS = 16384
_DIRECTIONS = 2
"""Gets need not wait for sets: each have as many connections as may be in use at once."""
_SHARE = 0.4
"""Of what is left of a call: what one node may take to tell of the others."""


class Nodes:
    """The servers that were met so far, each with its connections."""

    def __init__(self, settings: RedisSettings) -> None:
        self._options = settings.connection_options()
        self._settings = settings
        self._lock = threading.Lock()
        self._nodes: dict[tuple[str, int] | None, Node] = {}
        self._closed = False

    def first(self) -> Node:
        """The one that the URL names."""
        return self._known(None)

    def at(self, host: str, port: int) -> Node:
        """The one at an address; all else is as the URL says."""
        return self._known((host, port))

    @property
    def connections_made(self) -> int:
        """Since the start: after another one has been made the server may be another one too."""
        return sum(node.connections_made for node in list(self._nodes.values()))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def abandon(self) -> None:
        """In a forked child: leave everything to the parent. Takes no lock."""
        self._closed = True
        for node in self._nodes.values():
            node.abandon()

    def _known(self, where: tuple[str, int] | None) -> Node:
        with self._lock:
            if where not in self._nodes:
                self._nodes[where] = self._made(where)
            return self._nodes[where]

    def _made(self, where: tuple[str, int] | None) -> Node:
        options = dict(self._options)
        if where is not None:
            options |= {"host": where[0], "port": where[1]}
        kind: Any = TlsConnection if self._settings.is_tls else TcpConnection
        place = self._settings.place if where is None else f"{where[0]}:{where[1]}"
        if "path" in options:
            kind = UnixConnection
        make = partial(kind, **options)
        node = Node(place, make, _DIRECTIONS * self._settings.parallelism)
        if self._closed:
            node.close()
        return node


class Topology(Protocol):
    """Finds servers. Thread-safe."""

    def node_of(self, key: bytes, deadline: Deadline) -> Node:
        """The server that has the slot of `key`."""
        ...

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        """Every server that has slots."""
        ...

    def doubt(self) -> None:
        """A server did not answer, or said that another one has the key: look again next time."""
        ...


class OneServer:
    """The server of the URL."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def node_of(self, key: bytes, deadline: Deadline) -> Node:  # noqa: ARG002 - it has all
        return self._nodes.first()

    def all_nodes(self, deadline: Deadline) -> list[Node]:  # noqa: ARG002
        return [self._nodes.first()]

    def doubt(self) -> None:
        """There is no other."""


class WatchedServer:
    """The master that sentinels name."""

    def __init__(self, nodes: Nodes, settings: RedisSettings) -> None:
        self._nodes = nodes
        assert settings.sentinel_master is not None
        self._name = settings.sentinel_master
        self._lock = threading.Lock()
        self._master: Node | None = None
        addresses = [address(text) for text in settings.sentinels]
        secret = settings.sentinel_password
        each_s = settings.timeout_s * _SHARE / len(addresses)
        library: Any = redis.sentinel  # untyped
        self._sentinel = library.Sentinel(
            addresses,
            sentinel_kwargs={
                "username": settings.sentinel_username,
                "password": secret.get_secret_value() if secret else None,
                "socket_timeout": each_s,
                "socket_connect_timeout": each_s,
                "protocol": 2,
                "retry": Retry(NoBackoff(), 0),
            },
        )

    def node_of(self, key: bytes, deadline: Deadline) -> Node:  # noqa: ARG002 - it has all
        master = self._master
        if master is not None:
            return master
        with self._lock:
            deadline.left_s()
            try:
                host, port = self._sentinel.discover_master(self._name)
            finally:
                for sentinel in self._sentinel.sentinels:
                    sentinel.connection_pool.disconnect()
            master = self._master = self._nodes.at(host, port)
            return master

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        return [self.node_of(b"", deadline)]

    def doubt(self) -> None:
        self._master = None


class ClusterMap:
    """The masters of a cluster, each with its slots."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._owners: list[Node | None] = []
        """By slot; empty: nobody was asked yet."""
        self._doubted = True

    def node_of(self, key: bytes, deadline: Deadline) -> Node:
        owner = self._map(deadline)[key_slot(key)]
        if owner is None:
            self.doubt()
            raise exceptions.ClusterDownError("no server has the slot")
        return owner

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        return _each_once(self._map(deadline))

    def doubt(self) -> None:
        self._doubted = True

    def _map(self, deadline: Deadline) -> list[Node | None]:
        if not self._doubted:
            return self._owners
        owners = self._asked(deadline)
        with self._lock:
            self._owners, self._doubted = owners, False
        return owners

    def _asked(self, deadline: Deadline) -> list[Node | None]:
        """The map as the first server that answers has it."""
        candidates = [*_each_once(self._owners), self._nodes.first()]
        for node in candidates[:-1]:
            try:
                return self._told_by(node, deadline.part(_SHARE))
            except FAILURES:
                continue  # the next one may know
        return self._told_by(candidates[-1], deadline)

    def _told_by(self, node: Node, deadline: Deadline) -> list[Node | None]:
        with node.lent(deadline) as link:
            (reply,) = link.exchange([("CLUSTER", "SLOTS")])
        if isinstance(reply, ErrorReply):
            raise Refused(reply)
        own_host = node.place.rpartition(":")[0]
        owners: list[Node | None] = [None] * _SLOTS
        for first, last, master, *_ in reply:
            owner = self._nodes.at(_host(master[0]) or own_host, int(master[1]))
            owners[first : last + 1] = [owner] * (last + 1 - first)
        return owners


def _each_once(owners: Iterable[Node | None]) -> list[Node]:
    return [owner for owner in dict.fromkeys(owners) if owner is not None]


def _host(told: Reply) -> str:
    """A host as CLUSTER SLOTS tells it; empty where it is the one that was asked."""
    host = told.decode() if isinstance(told, bytes) else ""
    return "" if host == "?" else host
