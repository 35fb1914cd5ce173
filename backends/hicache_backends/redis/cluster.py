"""Which server has which keys: one server, or those of a cluster. `_sentinels` has the third way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from redis.crc import key_slot

from hicache_backends.redis.address import Address
from hicache_backends.redis.replies import FAILURES, MALFORMED, ErrorReply, Refused, WrongReply
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_backends.redis.nodes import Nodes
    from hicache_backends.redis.replies import Reply
    from hicache_backends.redis.server_pool import Node

_SLOTS = 16384
_SHARE = 0.4
"""Of what is left of a call: what one server may take to tell of the others."""


class Topology(Protocol):
    """Finds servers. Thread-safe."""

    def node_of(self, key: bytes, deadline: Deadline) -> Node | None:
        """The server that has the slot of `key`; None: no server has it."""
        ...

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        """Every server that has slots.

        Raises:
            OSError, RedisError: They are not known, or slots are without a server.
        """
        ...

    def doubt(self) -> None:
        """A server did not answer, or said that another one has the key: look again next time."""
        ...


class OneServer:
    """The server of the URL."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def node_of(self, key: bytes, deadline: Deadline) -> Node:  # noqa: ARG002 - it has all
        return self._node

    def all_nodes(self, deadline: Deadline) -> list[Node]:  # noqa: ARG002
        return [self._node]

    def doubt(self) -> None:
        """There is no other. Its name may lead to another one: the connections see to that."""


class ClusterMap:
    """The masters of a cluster, each with its slots."""

    def __init__(self, nodes: Nodes, first: Address) -> None:
        self._nodes = nodes
        self._first = first
        self._lock = threading.Lock()
        self._owners: list[Node | None] = []
        """By slot; empty: nobody was asked yet."""
        self._doubted = True

    def node_of(self, key: bytes, deadline: Deadline) -> Node | None:
        owner = self._map(deadline)[key_slot(key)]
        if owner is None:
            self.doubt()
        return owner

    def all_nodes(self, deadline: Deadline) -> list[Node]:
        owners = self._map(deadline)
        if None in owners:
            self.doubt()
            raise ConnectionError("a part of the slots is without a server")
        return _each_once(owners)

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
        candidates = [*_each_once(self._owners), self._nodes.at(self._first)]
        for node in candidates[:-1]:
            try:
                return self._told_by(node, Deadline(deadline.remaining_s() * _SHARE))
            except FAILURES:
                continue  # the next one may know
        return self._told_by(candidates[-1], deadline)

    def _told_by(self, node: Node, deadline: Deadline) -> list[Node | None]:
        with node.lent(deadline) as link:
            (reply,) = link.exchange([("CLUSTER", "SLOTS")])
        if isinstance(reply, ErrorReply):
            raise Refused(reply)
        try:
            return self._owners_of(reply, node.address.host)
        except MALFORMED as error:
            raise WrongReply("the map of the cluster has another form") from error

    def _owners_of(self, reply: Reply, host: str) -> list[Node | None]:
        """Read CLUSTER SLOTS. A server without a host of its own has that of the one asked."""
        owners: list[Node | None] = [None] * _SLOTS
        for first, last, master, *_ in reply:
            if not 0 <= first <= last < _SLOTS:
                raise ValueError("there is no such slot")
            owner = self._nodes.at(Address.parse(f"{_host(master[0])}:{master[1]}", host=host))
            owners[first : last + 1] = [owner] * (last + 1 - first)
        return owners


def _each_once(owners: Iterable[Node | None]) -> list[Node]:
    return [owner for owner in dict.fromkeys(owners) if owner is not None]


def _host(told: Reply) -> str:
    """A host as CLUSTER SLOTS tells it; empty where it is the one that was asked."""
    host = told.decode() if isinstance(told, bytes) else ""
    return "" if host == "?" else host
