from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from processes import in_a_fork
from servers import wait_until

from hicache_storage.backend_support.connection_pool import ConnectionPool
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket, connect
from hicache_storage.errors import StorageClosed, StorageTimeout

SOON_S = 30.0
SIZE = 2

Pool = ConnectionPool[DeadlineSocket]


class Server:
    """A server that accepts connections, and answers only when a test does it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.accepted: list[socket.socket] = []

    def connect(self, deadline: Deadline) -> DeadlineSocket:
        address = (socket.AF_INET, self._listener.getsockname())
        made = DeadlineSocket(connect([address], deadline), deadline)
        self.accepted.append(self._listener.accept()[0])
        return made

    def close(self) -> None:
        for one in (self._listener, *self.accepted):
            one.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def pool(server: Server) -> Iterator[Pool]:
    pool = ConnectionPool(server.connect, size=SIZE, local_errors=(KeyError,))
    yield pool
    pool.close()


def use(pool: Pool) -> DeadlineSocket:
    """Return the connection of a call that works."""
    with pool.acquire(Deadline(SOON_S)) as connection:
        return connection


def use_all(pool: Pool) -> None:
    """Make as many connections as the pool may have."""
    with ExitStack() as stack:
        for _ in range(SIZE):
            stack.enter_context(pool.acquire(Deadline(SOON_S)))


class TestReuse:
    def test_a_call_that_worked_leaves_its_connection_to_the_next(self, pool: Pool) -> None:
        assert use(pool) is use(pool)
        assert 1 == pool.connections_made

    def test_calls_at_once_have_connections_of_their_own(self, pool: Pool) -> None:
        with pool.acquire(Deadline(SOON_S)) as one, pool.acquire(Deadline(SOON_S)) as other:
            assert one is not other
            assert 2 == pool.in_use

        assert 0 == pool.in_use

    def test_each_call_has_its_own_deadline(self, pool: Pool) -> None:
        use(pool)
        deadline = Deadline(SOON_S)

        with pool.acquire(deadline) as connection:
            assert deadline is connection.deadline

    def test_a_connection_that_the_server_ended_is_not_lent(
        self, pool: Pool, server: Server
    ) -> None:
        ended = use(pool)
        server.accepted[0].close()

        assert ended is not use(pool)
        assert -1 == ended.fileno()

    def test_a_connection_with_a_late_reply_is_not_lent(self, pool: Pool, server: Server) -> None:
        late = use(pool)
        server.accepted[0].sendall(b"+OK\r\n")

        assert late is not use(pool)

    def test_a_server_that_ends_every_connection_is_an_error(
        self, pool: Pool, server: Server
    ) -> None:
        def connect_to_a_closing_server(deadline: Deadline) -> DeadlineSocket:
            made = server.connect(deadline)
            server.accepted[-1].close()
            return made

        closing = ConnectionPool(connect_to_a_closing_server, size=1)

        with pytest.raises(ConnectionResetError, match="ended a new connection"):
            use(closing)
        assert 0 == closing.in_use


class TestWaiting:
    def test_a_call_waits_for_a_connection_no_longer_than_it_may(self, pool: Pool) -> None:
        with pool.acquire(Deadline(SOON_S)), pool.acquire(Deadline(SOON_S)):  # noqa: SIM117
            with pytest.raises(StorageTimeout, match="all 2 connections were in use"):
                pool.acquire(Deadline(0.1)).__enter__()

    def test_a_call_that_waits_gets_the_connection_of_the_one_that_ends(self, pool: Pool) -> None:
        got: list[DeadlineSocket] = []
        with pool.acquire(Deadline(SOON_S)), ExitStack() as stack:
            other = stack.enter_context(pool.acquire(Deadline(SOON_S)))
            waiting = threading.Thread(target=lambda: got.append(use(pool)))
            waiting.start()
            wait_until(lambda: bool(pool._changed._waiters))  # type: ignore[attr-defined] # of threading.Condition
            stack.close()
            waiting.join(SOON_S)

        assert [other] == got

    def test_a_server_that_cannot_be_reached_takes_no_turn(self, server: Server) -> None:
        server.close()
        pool = ConnectionPool(server.connect, size=1)

        for _ in range(3):
            with pytest.raises(OSError, match=r"Bad file|refused"):
                use(pool)


class TestFailures:
    def test_a_connection_that_failed_is_closed(self, pool: Pool) -> None:
        with pytest.raises(TimeoutError), pool.acquire(Deadline(SOON_S)) as failed:
            raise TimeoutError

        assert -1 == failed.fileno()
        assert failed is not use(pool)

    def test_idle_connections_of_before_are_closed_too(self, pool: Pool) -> None:
        use_all(pool)
        with pytest.raises(ValueError, match="wrong"), pool.acquire(Deadline(SOON_S)):
            raise ValueError("wrong")

        use_all(pool)
        assert 2 * SIZE == pool.connections_made

    def test_a_connection_that_was_in_use_is_closed_after_its_call(self, pool: Pool) -> None:
        with pool.acquire(Deadline(SOON_S)) as other:
            with pytest.raises(OSError, match="gone"), pool.acquire(Deadline(SOON_S)):
                raise OSError("gone")
            assert other.fileno() > 0

        assert -1 == other.fileno()

    def test_a_local_error_ends_one_connection(self, pool: Pool) -> None:
        use_all(pool)
        with pytest.raises(KeyError), pool.acquire(Deadline(SOON_S)) as damaged:
            raise KeyError

        assert -1 == damaged.fileno()
        use_all(pool)
        assert SIZE + 1 == pool.connections_made

    def test_a_retired_connection_is_closed_after_its_call(self, pool: Pool) -> None:
        with pool.acquire(Deadline(SOON_S)) as retired:
            pool.retire()
            assert retired.fileno() > 0

        assert -1 == retired.fileno()


class TestClose:
    def test_idle_connections_are_closed(self, pool: Pool) -> None:
        idle = use(pool)
        pool.close()
        pool.close()

        assert -1 == idle.fileno()
        with pytest.raises(StorageClosed):
            use(pool)

    def test_a_call_that_waits_for_the_server_is_ended(self, pool: Pool) -> None:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                with pool.acquire(Deadline(SOON_S)) as connection:
                    connection.reader().readline()
            except StorageClosed as error:
                raised.append(error)

        waiting = threading.Thread(target=call)
        waiting.start()
        wait_until(lambda: pool.connections_made == 1)
        pool.close()
        pool.wait_closed(Deadline(SOON_S))

        assert 0 == pool.in_use
        waiting.join(SOON_S)
        assert 1 == len(raised)

    def test_a_call_that_waits_for_a_connection_is_ended(self, pool: Pool) -> None:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                pool.acquire(Deadline(10 * SOON_S)).__enter__()
            except StorageClosed as error:
                raised.append(error)

        with pool.acquire(Deadline(SOON_S)), pool.acquire(Deadline(SOON_S)):
            waiting = threading.Thread(target=call)
            waiting.start()
            wait_until(lambda: bool(pool._changed._waiters))  # type: ignore[attr-defined] # of threading.Condition
            pool.close()
            waiting.join(SOON_S)

        assert 1 == len(raised)

    def test_a_connection_that_is_being_made_is_not_lent(self, pool: Pool, server: Server) -> None:
        def connect_during_a_close(deadline: Deadline) -> DeadlineSocket:
            made = server.connect(deadline)
            closing.close()
            return made

        closing = ConnectionPool(connect_during_a_close, size=1)

        with pytest.raises(StorageClosed):
            use(closing)
        assert b"" == server.accepted[-1].recv(1)


class TestForks:
    def test_a_child_makes_its_own_connections(self, pool: Pool, server: Server) -> None:
        parents = use(pool)

        def tell() -> tuple[int, bool]:
            return parents.fileno(), use(pool) is parents

        assert (-1, False) == in_a_fork(tell)
        parents.sendall(b"still open")
        assert b"still open" == server.accepted[0].recv(99)
        assert parents is use(pool)

    def test_a_connection_in_use_stays_in_use_in_the_parent_only(self, pool: Pool) -> None:
        def tell() -> tuple[int, int]:
            return connection.fileno(), pool.in_use

        with pool.acquire(Deadline(SOON_S)) as connection:
            assert (-1, 0) == in_a_fork(tell)
            assert connection.fileno() > 0

    def test_a_child_that_was_forked_in_a_call_goes_on(self, pool: Pool) -> None:
        def tell() -> int:
            lent.__exit__(None, None, None)
            use(pool)
            return pool.connections_made

        lent = pool.acquire(Deadline(SOON_S))
        lent.__enter__()
        assert 2 == in_a_fork(tell)
        lent.__exit__(None, None, None)

    def test_a_child_needs_no_lock_that_another_thread_held(self, pool: Pool) -> None:
        with pool._lock:
            assert 0 == in_a_fork(lambda: pool.in_use if use(pool) else -1)

    def test_the_child_of_a_closed_pool_has_a_closed_pool(self, pool: Pool) -> None:
        def tell() -> str:
            try:
                use(pool)
            except StorageClosed:
                return "closed"
            return "open"

        pool.close()
        assert "closed" == in_a_fork(tell)
