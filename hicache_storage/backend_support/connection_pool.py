"""Lend a server's connections to calls, within their deadlines, and none after a failure."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hicache_storage.backend_support.fork_local import reset_in_children
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.backend_support.deadline import Deadline


class Connection(Protocol):
    """What a `ConnectionPool` needs of a connection. A `DeadlineSocket` is one."""

    def prepare(self, deadline: Deadline, /) -> bool:
        """Get ready for a call that ends by `deadline`. Greet the server if the connection is new.

        Return False if nothing may be sent: the server ended the connection, or sent what no call
        asked for, for example a late reply.
        """
        ...

    def shut_down(self) -> None:
        """End the connection, and wake up the thread that uses it. Any thread may call it."""
        ...

    def close(self) -> None:
        """Free the connection. Idempotent.

        Send nothing, because a forked child closes its copies of its parent's connections.
        """
        ...


C = TypeVar("C", bound=Connection)


@dataclass(slots=True, eq=False)
class _Use(Generic[C]):
    """The use of a connection by one call. Without a connection, it is being made."""

    generation: int
    connection: C | None
    is_sound: bool = True


class ConnectionPool(Generic[C]):
    """At most `size` connections to one server. One call at a time uses a connection. Thread-safe.

    `connect` makes a connection before the deadline, or raises OSError. If a call fails, the pool
    closes its connection, because a late reply may still arrive. It also closes all connections that
    were made earlier, because the server may be gone, or its address may lead to another one.
    `local_errors` end only their own connection. A forked child starts with an empty pool, and leaves
    its parent's connections alone.

    Examples:
        >>> import socket
        >>> from hicache_storage.backend_support.deadline import Deadline
        >>> from hicache_storage.backend_support.deadline_socket import DeadlineSocket, connect
        >>> server = socket.create_server(("127.0.0.1", 0))
        >>> addresses = [(socket.AF_INET, server.getsockname())]
        >>> pool = ConnectionPool(
        ...     lambda deadline: DeadlineSocket(connect(addresses, deadline), deadline), size=4
        ... )
        >>> with pool.acquire(Deadline(10.0)) as connection:
        ...     connection.sendall(b"PING")
        >>> with server, server.accept()[0] as peer:
        ...     print(peer.recv(4))
        b'PING'
        >>> pool.close()
    """

    def __init__(
        self,
        connect: Callable[[Deadline], C],
        *,
        size: int,
        local_errors: tuple[type[BaseException], ...] = (),
    ) -> None:
        self.connections_made: int = 0
        """How many connections were made so far. A new one may lead to another server."""
        self._connect = connect
        self._size = size
        self._local_errors = local_errors
        self._idle: list[C] = []
        self._busy: set[_Use[C]] = set()
        self._generation = 0
        """The current generation. If a call fails, all connections of its generation end."""
        self._closed = False
        self._lock = threading.Lock()  # faster to lock than the condition
        self._changed = threading.Condition(self._lock)
        reset_in_children(self)

    @property
    def in_use(self) -> int:
        """How many connections calls use now, or are making."""
        return len(self._busy)

    @contextmanager
    def acquire(self, deadline: Deadline) -> Generator[C, None, None]:
        """Lend a connection that is ready for a call. The wait for it is a part of the call.

        Raises:
            StorageTimeout: All connections were in use.
            StorageClosed: The pool is closed, or `close` ended the connection.
            OSError: The server cannot be reached.
        """
        use = self._begin(deadline)
        try:
            yield self._ready(use, deadline)
        except BaseException as error:
            use.is_sound = False
            if not isinstance(error, self._local_errors):
                self.retire()
            if isinstance(error, OSError):
                self._check_open()
            raise
        finally:
            self._end(use)

    def retire(self) -> None:
        """Lend no connection again that exists now. Those in use are closed after their calls."""
        with self._lock:
            self._generation += 1
            self._close_idle()

    def close(self) -> None:
        """End all connections, even those in use, and make no new ones. Idempotent."""
        with self._lock:
            self._closed = True
            for use in self._busy:
                if use.connection is not None:
                    use.connection.shut_down()
            self._close_idle()
            self._changed.notify_all()

    def wait_closed(self, deadline: Deadline) -> None:
        """Wait until no connection is in use. A connection that is being made cannot be ended."""
        with self._lock:
            self._changed.wait_for(lambda: not self._busy, deadline.remaining_s())

    def after_fork(self) -> None:
        """Close a forked child's copies of the connections. The child has no other thread."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        busy, self._busy = self._busy, set()
        self._idle += [use.connection for use in busy if use.connection is not None]
        self.retire()

    # --- parts -----------------------------------------------------------------------------------

    def _begin(self, deadline: Deadline) -> _Use[C]:
        with self._lock:
            may_begin = self._may_begin
            if not may_begin() and not self._changed.wait_for(may_begin, deadline.remaining_s()):
                raise StorageTimeout(
                    f"all {self._size} connections were in use for {deadline.timeout_s:g} s"
                )
            self._check_open()
            use = _Use(self._generation, self._idle.pop() if self._idle else None)
            self._busy.add(use)
            return use

    def _may_begin(self) -> bool:
        return self._closed or len(self._busy) < self._size

    def _check_open(self) -> None:
        if self._closed:
            raise StorageClosed("the connections of this storage were closed: open a new one")

    def _ready(self, use: _Use[C], deadline: Deadline) -> C:
        if use.connection is not None:
            if use.connection.prepare(deadline):
                return use.connection
            with self._lock:
                use.connection.close()
                use.connection = None
        made = self._connect(deadline)
        with self._lock:
            use.connection = made
            self.connections_made += 1
        self._check_open()  # `close` cannot end a connection that is being made
        if not made.prepare(deadline):
            raise ConnectionResetError(
                "the server ended a new connection, or sent data that no call asked for"
            )
        return made

    def _end(self, use: _Use[C]) -> None:
        with self._lock:
            self._busy.discard(use)  # a fork during the call has emptied it
            is_current = use.generation == self._generation and not self._closed
            if use.connection is not None:
                if use.is_sound and is_current:
                    self._idle.append(use.connection)
                else:
                    use.connection.close()
            self._changed.notify_all()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()
