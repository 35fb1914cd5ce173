"""Pools of connections, one per server, and the facts that a server reports about itself."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.redis.connection import Connection
from hicache_backends.redis.replies import WrongReply
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Generator

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


class ServerPool:
    """A pool of connections to one server. One call at a time uses a connection. Thread-safe."""

    def __init__(self, address: Address, access: Access, limit: int) -> None:
        self.address = address
        self.connections_made = 0
        self._access = access
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        """The connections in use, each with its generation."""
        self._generation = 0
        """The current generation. If one connection fails, its whole generation ends."""
        self._closed = False

    @contextmanager
    def acquire(self, deadline: Deadline) -> Generator[Connection, None, None]:
        """Lend a connection that is ready. If it fails or is stale, its whole generation ends.

        A wrong reply ends only its own connection, because usually one page is damaged and the
        server works.

        Raises:
            StorageTimeout: All connections were in use.
            StorageClosed: The pool is closed.
            OSError, RedisError: The server cannot be reached, or refuses the credentials.
        """
        connection = self._take(deadline)
        try:
            self.connections_made += connection.prepare(deadline)
            self._check_open()  # `close` cannot end a connection that is being made
            yield connection
        except WrongReply:
            self._put_back(connection, is_sound=False, ends_generation=False)
            raise
        except BaseException:
            self._put_back(connection, is_sound=False, ends_generation=True)
            raise
        is_stale = connection.is_stale
        self._put_back(connection, is_sound=not is_stale, ends_generation=is_stale)

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

    def close(self) -> None:
        """End all connections, even those in use, and open no new ones. Idempotent."""
        with self._changed:
            self._closed = True
            for connection in self._busy:
                connection.shut_down()
            self._drop_idle()
            self._changed.notify_all()

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until no connection is in use. A connection that is being made cannot be ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, deadline.remaining_s())

    def abandon(self) -> None:
        """Close a forked child's copies of the connections. The parent's copies stay open.

        Take no lock: a thread that does not exist in the child may have held it.
        """
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.drop()

    # --- parts -----------------------------------------------------------------------------------

    def _take(self, deadline: Deadline) -> Connection:
        with self._changed:
            if not self._changed.wait_for(self._may_take, deadline.remaining_s()):
                raise StorageTimeout(
                    f"all {self._limit} connections were in use for {deadline.timeout_s:g} s"
                )
            self._check_open()
            connection = self._idle.pop() if self._idle else Connection(self.address, self._access)
            connection.is_alone = not self._busy
            self._busy[connection] = self._generation
            return connection

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed(
                f"the connections to {self.address} were closed: open a new storage"
            )

    def _may_take(self) -> bool:
        return self._closed or len(self._busy) < self._limit

    def _put_back(self, connection: Connection, *, is_sound: bool, ends_generation: bool) -> None:
        with self._changed:
            generation = self._busy.pop(connection)
            if ends_generation:  # the address may lead to another server now
                self._generation += 1
                self._drop_idle()
            if is_sound and generation == self._generation and not self._closed:
                self._idle.append(connection)
            else:
                connection.drop()
            self._changed.notify_all()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().drop()


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

    def abandon(self) -> None:
        """Close a forked child's copies of all connections. Take no lock."""
        self._closed = True
        for pool in self._pools.values():
            pool.abandon()
