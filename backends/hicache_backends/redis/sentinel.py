"""Find the master through sentinels, which redis-py's `Sentinel` asks over our connections."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import redis
import redis.sentinel
from redis import exceptions

from hicache_backends.redis.access import Address
from hicache_backends.redis.replies import (
    FAILURES,
    MALFORMED,
    TIMEOUTS,
    ErrorReply,
    Refused,
    WrongReply,
)
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_backends.redis.server_pool import ServerPool, ServerPools

_DISCOVERY_SHARE = 0.4
"""The share of the remaining time that all sentinels together may take."""
_DOWN = ("is_sdown", "is_odown", "is_disconnected")


class SentinelMaster:
    """A master that sentinels know by name. Thread-safe."""

    def __init__(
        self, pools: ServerPools, sentinels: ServerPools, addresses: Sequence[Address], name: str
    ) -> None:
        self._pools = pools
        self._sentinels = sentinels
        self._addresses = addresses
        self._name = name
        self._lock = threading.Lock()
        self._master: ServerPool | None = None

    def server_of(self, key: bytes, deadline: Deadline) -> ServerPool:  # noqa: ARG002 - it has all
        master = self._master
        if master is not None:
            return master
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise StorageTimeout(
                f"other calls have asked the sentinels for the master for {deadline.timeout_s:g} s"
            )
        try:
            if self._master is None:
                self._master = self._pools.at(self._discover(deadline))
            return self._master
        finally:
            self._lock.release()

    def all_servers(self, deadline: Deadline) -> list[ServerPool]:
        return [self.server_of(b"", deadline)]

    def placement(self, deadline: Deadline) -> object:
        self.invalidate()
        return self.server_of(b"", deadline)

    def invalidate(self) -> None:
        self._master = None

    def _discover(self, deadline: Deadline) -> Address:
        """Return the master's address from the first sentinel that knows it."""
        budget = Deadline(deadline.remaining_s() * _DISCOVERY_SHARE)
        count = len(self._addresses)
        clients = [
            _SentinelClient(self._sentinels.at(address), budget, sharers=count - index)
            for index, address in enumerate(self._addresses)
        ]
        discovery = _discovery_class([])
        discovery.sentinels = [*clients]
        try:
            host, port = discovery.discover_master(self._name)
        except redis.sentinel.MasterNotFoundError:
            # Its text has errors as repr(), which may escape a secret, so that we would not find
            # it.
            timed_out = any(isinstance(one.failure, TIMEOUTS) for one in clients)
            kind = StorageTimeout if timed_out else StorageUnavailable
            reasons = "; ".join(map(_reason, clients))
            raise kind(
                f"no sentinel names the master {self._name!r}: {reasons}", advice=_advice(clients)
            ) from None
        return Address.parse(f"{host}:{port}")


class _Discovery(redis.sentinel.Sentinel):
    """redis-py's search for a master, with a stricter check of its state."""

    def check_master_state(self, state: Mapping[str, Any], service_name: str) -> bool:  # noqa: ARG002
        """Return True for a master that is up and has an address.

        redis-py also accepts a master from which the sentinel is disconnected, and an address of
        any form.
        """
        try:
            Address.parse(f"{state['ip']}:{state['port']}")
        except MALFORMED:
            return False
        return state["is_master"] and not any(state[flag] for flag in _DOWN)


class _SentinelClient(redis.Redis):
    """redis-py's client of one sentinel. Its commands go over our connections.

    `sharers` clients, including this one, divide the time that is left of `budget`.
    """

    def __init__(self, pool: ServerPool, budget: Deadline, *, sharers: int) -> None:
        client: Any = super()  # partially untyped
        client.__init__(protocol=2)
        self.failure: Exception | None = None
        self.pool = pool
        self._budget = budget
        self._sharers = sharers

    def execute_command(self, *args: Any, **_: Any) -> Any:
        """Return the reply as redis-py parses it.

        Raises:
            redis.ConnectionError: The sentinel did not answer, refused, or sent a malformed reply.
        """
        deadline = Deadline(self._budget.remaining_s() / self._sharers)
        try:
            with self.pool.acquire(deadline) as connection:
                (reply,) = connection.execute([args])
            if isinstance(reply, ErrorReply):
                raise Refused(reply)
            parsers: Any = self.response_callbacks
            return parsers[args[0]](reply)
        except FAILURES as error:
            self.failure = error
        except MALFORMED:
            self.failure = WrongReply("a reply has an unexpected form")
        raise exceptions.ConnectionError(str(self.failure)) from self.failure


_discovery_class: Any = _Discovery  # untyped


def _advice(clients: Sequence[_SentinelClient]) -> str | None:
    """Return what to do if a sentinel answered that it knows no such master, or failed with advice."""
    if all(one.failure is not None for one in clients):
        return getattr(clients[0].failure, "advice", None)
    return (
        "correct sentinel_master: `redis-cli -p PORT sentinel masters` lists the names. If it is right,"
        " its server is down"
    )


def _reason(client: _SentinelClient) -> str:
    return f"{client.pool.address}: {client.failure or 'it knows no such master that is up'}"
