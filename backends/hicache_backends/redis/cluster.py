"""Find the server of each key: a single server, or the servers of a cluster.

The module `sentinel` has the third kind of deployment.

redis-py computes the slots of keys and parses CLUSTER SLOTS. Its `NodesManager` is not used,
because it keeps no deadline: see docs/adr/0008-discovery-by-redis-py.md.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from redis import cluster
from redis.crc import key_slot

from hicache_backends.redis.access import Address
from hicache_backends.redis.replies import FAILURES, MALFORMED, ErrorReply, Refused, WrongReply
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_backends.redis.replies import Reply
    from hicache_backends.redis.server_pool import ServerPool, ServerPools

_cluster: Any = cluster  # untyped in some releases
_SLOTS = 16384
_REFRESH_SHARE = 0.4
"""The share of the remaining time that one server may take to report the slots."""
_EPOCH_FIELD = 6
"""The position of a server's epoch in its line of CLUSTER NODES. The slots follow it."""
_UNKNOWN_HOST = "?"
"""What a server reports if it does not know its own host."""


class Deployment(Protocol):
    """The servers that hold the keys. Thread-safe."""

    def server_of(self, key: bytes, deadline: Deadline) -> ServerPool | None:
        """Return the server that has the slot of `key`, or None if no server has it."""
        ...

    def all_servers(self, deadline: Deadline) -> list[ServerPool]:
        """Return every server that has slots.

        Raises:
            OSError, RedisError: The servers are not known, or some slots have no server.
        """
        ...

    def placement(self, deadline: Deadline) -> object:
        """Ask the servers where the keys are. The returned value changes if a key moves.

        Raises:
            OSError, RedisError: As in `all_servers`, or keys are moving between two servers.
        """
        ...

    def invalidate(self) -> None:
        """Make the next call look the servers up again, because a server failed or lacks a key."""
        ...


class SingleServer:
    """The server of the URL."""

    def __init__(self, server: ServerPool) -> None:
        self._server = server

    def server_of(self, key: bytes, deadline: Deadline) -> ServerPool:  # noqa: ARG002 - it has all
        return self._server

    def all_servers(self, deadline: Deadline) -> list[ServerPool]:  # noqa: ARG002
        return [self._server]

    def placement(self, deadline: Deadline) -> object:  # noqa: ARG002 - nothing can move
        return self._server

    def invalidate(self) -> None:
        """Do nothing. If the name leads to another server, new connections reach that server."""


class Cluster:
    """The masters of a cluster, each with its slots."""

    def __init__(self, pools: ServerPools, seed: Address) -> None:
        self._pools = pools
        self._seed = seed
        self._lock = threading.Lock()
        self._owners: list[ServerPool | None] = []
        """The server of each slot. Empty before the first lookup."""
        self._is_valid = False

    def server_of(self, key: bytes, deadline: Deadline) -> ServerPool | None:
        owner = self._current_owners(deadline)[key_slot(key)]
        if owner is None:
            self.invalidate()
        return owner

    def all_servers(self, deadline: Deadline) -> list[ServerPool]:
        owners = self._current_owners(deadline)
        if None in owners:
            self.invalidate()
            raise ConnectionError("some slots have no server")
        return _distinct(owners)

    def placement(self, deadline: Deadline) -> object:
        """Return each server's slots, with the epoch of its last change.

        If a slot moves away and comes back, its server is the same but its epoch differs.
        """
        self.invalidate()
        servers = self.all_servers(deadline)
        return self._owners, [self._own_slots(server, deadline) for server in servers]

    def invalidate(self) -> None:
        self._is_valid = False

    def _own_slots(self, server: ServerPool, deadline: Deadline) -> list[bytes] | None:
        """Return the epoch and slots that `server` reports for itself, or None if we may not ask."""
        with server.acquire(deadline) as connection:
            (reply,) = connection.execute([("CLUSTER", "NODES")])
        if isinstance(reply, ErrorReply) and reply.code == "NOPERM":
            return None
        lines = [line.split() for line in reply.splitlines()] if isinstance(reply, bytes) else []
        own = [line for line in lines if b"myself" in b"".join(line[2:3])]
        if len(own) != 1:
            raise WrongReply("the servers of the cluster are listed in an unexpected form")
        slots = own[0][_EPOCH_FIELD:]
        if any(slot.startswith(b"[") for slot in slots):
            raise ConnectionError(
                f"slots are moving from or to {server.address}: list again when they have moved"
            )
        return slots

    def _current_owners(self, deadline: Deadline) -> list[ServerPool | None]:
        if self._is_valid:
            return self._owners
        owners = self._look_up(deadline)
        with self._lock:
            self._owners, self._is_valid = owners, True
        return owners

    def _look_up(self, deadline: Deadline) -> list[ServerPool | None]:
        """Return the slots that the first server to answer reports."""
        *known, seed = [*_distinct(self._owners), self._pools.at(self._seed)]
        for server in known:
            try:
                return self._ask(server, Deadline(deadline.remaining_s() * _REFRESH_SHARE))
            except FAILURES:
                continue  # another server may answer
        return self._ask(seed, deadline)

    def _ask(self, server: ServerPool, deadline: Deadline) -> list[ServerPool | None]:
        with server.acquire(deadline) as connection:
            (reply,) = connection.execute([("CLUSTER", "SLOTS")])
        if isinstance(reply, ErrorReply):
            raise Refused(reply)
        try:
            return self._parse(reply, server.address.host)
        except MALFORMED as error:
            raise WrongReply("the map of the cluster has an unexpected form") from error

    def _parse(self, reply: Reply, asked_host: str) -> list[ServerPool | None]:
        """Parse the owners from CLUSTER SLOTS. A server without a host is at `asked_host`."""
        owners: list[ServerPool | None] = [None] * _SLOTS
        slots = _cluster.parse_cluster_slots(reply, current_host=asked_host)
        for (first, last), servers in slots.items():
            if not 0 <= first <= last < _SLOTS:
                raise ValueError(f"slots {first} to {last} do not exist")
            host, port = servers["primary"]
            host = "" if host == _UNKNOWN_HOST else host
            address = Address.parse(f"{host}:{port}", default_host=asked_host)
            owners[first : last + 1] = [self._pools.at(address)] * (last + 1 - first)
        return owners


def _distinct(owners: Iterable[ServerPool | None]) -> list[ServerPool]:
    return [owner for owner in dict.fromkeys(owners) if owner is not None]
