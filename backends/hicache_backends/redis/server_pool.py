"""Pools of connections, one per server, and the facts that a server reports about itself."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.redis.connection import Connection
from hicache_backends.redis.replies import WrongReply
from hicache_storage.backend_support.connection_pool import ConnectionPool

if TYPE_CHECKING:
    from hicache_backends.redis.access import Access, Address
    from hicache_storage.backend_support.deadline import Deadline

NUMBER = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A part of INFO. If INFO is forbidden, nothing is known."""

    policy: str | None
    """`maxmemory-policy`. CONFIG reports it too, but many managed servers forbid CONFIG."""
    evicted_keys: int
    """How many keys were evicted since the server was started."""
    is_cluster: bool
    is_sentinel: bool = False

    @classmethod
    def parse(cls, info: str) -> ServerFacts:
        fields = parse_info(info)
        evicted = fields.get("evicted_keys", "0")
        return cls(
            policy=fields.get("maxmemory_policy"),
            # Indices are trusted only if none was evicted, so a malformed number counts as an
            # eviction.
            evicted_keys=int(evicted) if NUMBER.fullmatch(evicted) else 1,
            is_cluster=fields.get("cluster_enabled") == "1",
            is_sentinel=fields.get("redis_mode") == "sentinel",
        )

    @property
    def may_evict_anything(self) -> bool:
        """True if keys without an expiry may be evicted, so an index may be lost before its pages."""
        return self.policy is None or self.policy.startswith("allkeys")

    @property
    def has_whole_indices(self) -> bool:
        """True if no index can have been evicted, neither under this policy nor under an earlier one."""
        if self.may_evict_anything or self.policy is None:
            return False
        return self.evicted_keys == 0 or self.policy.startswith("volatile")


def parse_info(info: str) -> dict[str, str]:
    """Parse the fields of INFO."""
    lines = (line.partition(":") for line in info.splitlines())
    return {name: value.strip() for name, _, value in lines}


class ServerPool(ConnectionPool[Connection]):
    """The connections to one server. A failure ends all of them, a wrong reply only its own.

    After a wrong reply, usually one page is damaged and the server works.
    """

    def __init__(self, address: Address, access: Access, limit: int) -> None:
        def connect(deadline: Deadline) -> Connection:
            return Connection(self, address, access, deadline)

        super().__init__(connect, size=limit, local_errors=(WrongReply,))
        self.address = address

    def facts(self, deadline: Deadline) -> ServerFacts:
        """Ask the server for its facts.

        Raises:
            OSError, RedisError: The server does not answer.
        """
        return ServerFacts.parse(self.info(deadline))

    def info(self, deadline: Deadline) -> str:
        """Return the server's INFO, or empty text if INFO is forbidden. Raises what `facts` raises."""
        with self.acquire(deadline) as connection:
            (reply,) = connection.execute([("INFO",)])
        return reply.decode(errors="replace") if isinstance(reply, bytes) else ""


class ServerPools:
    """The pools of all servers that this process has used, by address. Thread-safe."""

    def __init__(self, access: Access, limit: int) -> None:
        self._access = access
        self._limit = limit
        self._lock = threading.Lock()
        self._pools: dict[Address, ServerPool] = {}
        self._closed = False

    def at(self, address: Address) -> ServerPool:
        """Return the pool of the server at `address`, the same pool each time."""
        with self._lock:
            if address not in self._pools:
                self._pools[address] = ServerPool(address, self._access, self._limit)
                if self._closed:
                    self._pools[address].close()
            return self._pools[address]

    @property
    def connections_made(self) -> int:
        """The number of connections made so far. A new connection may lead to another server."""
        return sum(pool.connections_made for pool in list(self._pools.values()))

    def close(self) -> None:
        """End all connections to all servers, and open no new ones. Idempotent."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until no connection is in use."""
        for pool in list(self._pools.values()):
            pool.wait_closed(deadline)
