"""A pool of connections to one server, which fail, become stale and are closed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from hicache_storage.backend_support.connection_pool import ConnectionPool
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageClosed
from interleavings.scenario import Scenario

_SIZE = 2


class _BadReply(Exception):
    """A failure that concerns one connection."""


class _Connection:
    """A connection without a socket. It records each use that the pool must prevent."""

    def __init__(self, scenario: ConnectionPoolScenario) -> None:
        self.is_in_use = self.is_shut_down = self.is_closed = False
        self.generation: int | None = None
        """The generation of the pool when a call first used the connection."""
        self._scenario = scenario

    def prepare(self, _: Deadline) -> bool:
        scenario = self._scenario
        scenario.require(not self.is_closed, "a call uses a connection that was closed")
        (use,) = (use for use in list(scenario.pool._busy) if use.connection is self)
        is_current = self.generation in (None, use.generation)
        scenario.require(is_current, "a call uses a connection of before a failure")
        self.generation = use.generation
        with self.used():
            scenario.scheduler.point("greets the server")
        return not self.is_shut_down and scenario.pick((True, True, True, False))

    @contextmanager
    def used(self) -> Generator[None]:
        self._scenario.require(not self.is_in_use, "two calls use one connection")
        self.is_in_use = True
        yield
        self.is_in_use = False

    def shut_down(self) -> None:
        self._scenario.require(not self.is_closed, "a connection is shut down after its end")
        self.is_shut_down = True

    def close(self) -> None:
        self._scenario.require(not self.is_in_use, "a connection is closed while a call uses it")
        self._scenario.require(not self.is_closed, "a connection is closed twice")
        self.is_closed = True


class ConnectionPoolScenario(Scenario):
    """Calls share few connections, of which some fail.

    Only one call at a time uses a connection. A failure ends the connections that are idle at that
    time, except an error that is local. After `close` no connection is open.
    """

    name = "connection-pool"

    def set_up(self) -> None:
        self.made: list[_Connection] = []
        self.pool = ConnectionPool(self._connect, size=_SIZE, local_errors=(_BadReply,))

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "first": self._call,
            "second": self._call,
            "third": self._call,
            "closer": self._close,
        }

    def check(self) -> None:
        open_ones = sum(not connection.is_closed for connection in self.made)
        assert open_ones <= _SIZE, "more connections are open than the limit"

    def finish(self) -> None:
        self.pool.close()
        self.pool.wait_closed(Deadline(1000.0))
        self.require(all(each.is_closed for each in self.made), "a connection is left open")

    def _connect(self, _: Deadline) -> _Connection:
        self.scheduler.point("connects")
        if self.pick((False, False, False, True)):
            raise OSError("the server cannot be reached")
        self.made.append(_Connection(self))
        return self.made[-1]

    def _call(self) -> None:
        for _ in range(3):
            try:
                with self.pool.acquire(Deadline(self.pick((1.0, 10.0)))) as connection:
                    with connection.used():
                        self.scheduler.point("uses its connection")
                    if self.pick((False, False, True)):
                        raise self.pick((ConnectionResetError(), _BadReply()))
            except (OSError, StorageClosed, _BadReply):  # as the callers of the pool expect
                continue

    def _close(self) -> None:
        if self.pick((False, True)):
            self.pool.close()
