"""The redis backend's connections to one server, which fail, become stale and are closed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest import mock

from hicache_backends.redis import server_pool
from hicache_backends.redis.server_pool import ServerPool

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageClosed
from interleavings.scenario import Scenario

_LIMIT = 2


class _Connection:
    """A connection without a socket. It records each use that the pool must prevent."""

    def __init__(self, scenario: ServerPoolScenario) -> None:
        self.is_stale = False
        self.in_use = self.is_dropped = False
        self.generation: int | None = None
        """The generation of the pool when the connection was first used."""
        self._scenario = scenario
        scenario.made.append(self)

    def prepare(self, _: Deadline) -> bool:
        scenario = self._scenario
        scenario.require(not self.is_dropped, "a call uses a connection that was dropped")
        generation = scenario.pool._busy[cast("Any", self)]
        is_current = self.generation in (None, generation)
        scenario.require(is_current, "a call uses a connection of before a failure")
        self.generation = generation
        with self.used():
            scenario.scheduler.point("connects")
        if scenario.pick((False, False, False, True)):
            raise OSError("the server cannot be reached")
        return True

    @contextmanager
    def used(self) -> Generator[None]:
        self._scenario.require(not self.in_use, "two calls use one connection")
        self.in_use = True
        yield
        self.in_use = False

    def shut_down(self) -> None:
        self.is_stale = True

    def drop(self) -> None:
        self._scenario.require(not self.in_use, "a connection is dropped while a call uses it")
        self._scenario.require(not self.is_dropped, "a connection is dropped twice")
        self.is_dropped = True


class ServerPoolScenario(Scenario):
    """Calls share few connections, of which some fail.

    Only one call at a time uses a connection. A failure ends the connections that are idle at that
    time. After `close` no connection is open.
    """

    name = "server-pool"

    def replaced(self) -> AbstractContextManager[object]:
        def connect(*_: object) -> _Connection:
            return _Connection(self)

        return mock.patch.object(server_pool, "Connection", connect)

    def set_up(self) -> None:
        self.made: list[_Connection] = []
        self.pool = ServerPool(cast("Any", "server"), cast("Any", None), _LIMIT)

    def threads(self) -> Mapping[str, Callable[[], None]]:
        return {
            "first": self._call,
            "second": self._call,
            "third": self._call,
            "closer": self._close,
        }

    def check(self) -> None:
        open_ones = sum(not connection.is_dropped for connection in self.made)
        assert open_ones <= _LIMIT, "more connections are open than the limit"

    def finish(self) -> None:
        self.pool.close()
        self.pool.wait_closed(Deadline(1000.0))
        self.require(all(each.is_dropped for each in self.made), "a connection is left open")

    def _call(self) -> None:
        for _ in range(3):
            try:
                with self.pool.acquire(Deadline(self.pick((1.0, 10.0)))) as lent:
                    connection = cast("_Connection", cast("Any", lent))
                    with connection.used():
                        self.scheduler.point("uses its connection")
                    if self.pick((False, False, True)):
                        raise ConnectionResetError
            except (OSError, StorageClosed):  # as the callers of the pool expect
                continue

    def _close(self) -> None:
        if self.pick((False, True)):
            self.pool.close()
