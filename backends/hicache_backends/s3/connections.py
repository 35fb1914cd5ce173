"""The connections of one process to one server: kept alive between requests, given up together."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.s3.connection import Connection
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    import ssl

    from hicache_backends.s3.addresses import Address, Addresses
    from hicache_storage.backend_support.deadline import Deadline

_CLOSE_LIMIT_S = 9.0
# Gateways forget connections that are idle for long, and tell nobody.
_KEPT_S = 60.0
_GLANCE_S = 0.2
"""How often who waits for an address looks whether the storage was closed."""


class Connections:
    """Idle connections, and the number of those in use. Thread-safe."""

    def __init__(
        self, host: str, addresses: Addresses, tls: ssl.SSLContext | None, *, most_idle: int
    ) -> None:
        self.is_closed = False
        self._host = host
        self._addresses = addresses
        self._tls = tls
        self._most_idle = most_idle
        self._idle: list[Connection] = []
        self._running = 0
        self._changed = threading.Condition()

    def abandon(self) -> None:
        """In a forked child: close what was inherited idle, which ends nothing for the parent."""
        for connection in self._idle:
            connection.close()

    def enter(self) -> None:
        """A call begins.

        Raises:
            StorageClosed: `close` was called.
        """
        with self._changed:
            self.ensure_open()
            self._running += 1

    def leave(self) -> None:
        """A call ends; it holds no connection any more."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def ensure_open(self) -> None:
        if self.is_closed:
            raise StorageClosed("this S3Storage was closed: open a new one")

    def idle(self) -> Connection | None:
        """The connection that was used last, if it still lives."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            is_young = time.monotonic() - connection.moved_s < _KEPT_S
            if is_young and connection.is_idle():
                return connection
            connection.close()
        return None

    def connect(self, deadline: Deadline) -> tuple[Connection, Address]:
        """Return a new connection, which is being made.

        Raises:
            OSError: It can't be made.
            StorageUnavailable, StorageTimeout: The host has no address.
            StorageClosed: `close` was called meanwhile.
        """
        while not self._addresses.await_known(min(_GLANCE_S, deadline.remaining_s())):
            self.ensure_open()
            if deadline.passed():
                raise StorageTimeout(f"s3: the host {self._host} was not resolved in time")
        address = self._addresses.next()
        try:
            return Connection(address, self._tls, self._host), address
        except OSError:
            self._addresses.failed(address)
            raise

    def failed(self, address: Address) -> None:
        """A connection to this address was not made."""
        self._addresses.failed(address)

    def give_back(self, connection: Connection) -> None:
        """Keep it for the next request, or close it."""
        if connection.is_reusable and not self.is_closed and len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Have running calls end, and close everything."""
        self.is_closed = True
        deadline_s = time.monotonic() + _CLOSE_LIMIT_S
        with self._changed:
            self._changed.wait_for(
                lambda: not self._running, timeout=max(0.0, deadline_s - time.monotonic())
            )
        while self._idle:
            self._idle.pop().close()
