"""Connections to the server. Each carries one request at a time, does not block, and is reused."""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.s3.replies import SCRATCH_NBYTES, Malformed, ReplyReader
from hicache_storage import native
from hicache_storage.backend_support.revocable import within_access
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.backend_support.vectored_io import IOV_MAX, pieces_after
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.s3.addresses import Address, Addresses
    from hicache_backends.s3.replies import Reply
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Revocable

_BOTH = select.POLLIN | select.POLLOUT
_TURN_NBYTES = 4 << 20
"""How many bytes may move before the deadline is checked again."""
_CLOSE_LIMIT_S = 9.0
# Gateways silently drop connections that are idle for long.
_KEPT_S = 60.0
_CLOSED_CHECK_S = 0.2
"""How often a call that waits for an address checks whether the storage was closed."""


@dataclass(slots=True, kw_only=True, repr=False, eq=False)
class Request:
    """A request, and the memory for the body of a successful reply. Never modified.

    The class is not frozen, because a frozen object takes 1 us longer to make.
    """

    head: bytes
    body: Sequence[memoryview] = ()
    has_reply_body: bool = True
    """False for a HEAD."""
    into: Sequence[memoryview] = ()
    into_nbytes: int = 0
    revocable: Revocable | None = None
    """Permission to access the memory of `body` and `into`."""


class Connection:
    """A socket that carries one request at a time. One thread uses it at a time.

    A method may raise OSError, `Malformed` or `RevokedError`. After any of them, close the connection.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, host: str) -> None:
        self._tls = tls
        self._host = host
        self._scratch = bytearray(SCRATCH_NBYTES)
        self._unsent: list[memoryview] = []
        self._reader: ReplyReader | None = None
        self._revocable: Revocable | None = None
        self._cannot_send = False
        self._events = select.POLLOUT
        self.is_connected = False
        self.is_lent = False
        """True while the data plane carries this connection's requests."""
        self.was_used = False
        """True if the connection carried a request before the current one. The owner sets it."""
        self.last_progress_s = 0.0
        """The time of the last event. The owner sets it."""
        self._socket = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._connect(address)
        except BaseException:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    @property
    def events(self) -> int:
        """The events that the connection waits for, as a mask of `select.poll`."""
        return self._events

    @property
    def is_sent(self) -> bool:
        """True once the whole request was sent, so that the server may have it."""
        return self.is_connected and not self._unsent and not self._cannot_send

    @property
    def is_silent(self) -> bool:
        """True while no byte of a reply has arrived."""
        return self._reader is None or not self._reader.has_begun

    @property
    def is_reusable(self) -> bool:
        """True if the last reply ended cleanly. After `lend`, the data plane has checked that."""
        reader = self._reader
        return self.is_sent and (reader is None or (reader.reply is not None and reader.reusable))

    def is_idle(self) -> bool:
        """Return True if nothing has arrived since the last reply, not even the connection's end."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return not poller.poll(0) and not self._has_pending()

    def begin(self, request: Request) -> None:
        """Begin a request, and send as much as the socket accepts."""
        self.is_lent = False
        self._expect(request)
        if self.is_connected:
            self._send()

    def lend(self) -> None:
        """Leave the next requests to the data plane."""
        self._unsent = []
        self._reader = None
        self.is_lent = True

    def resume(
        self, request: Request, *, sent: int, received: bytes, head_nbytes: int, filled: int
    ) -> Reply | None:
        """Continue a request that the data plane began. Return the reply if it is complete.

        Args:
            request: The request.
            sent: The number of bytes that were sent.
            received: The beginning of the reply, with the bytes after the head that came with it.
            head_nbytes: The size of the head; 0 if it was incomplete or not checked.
            filled: The number of bytes of the page that were received.
        """
        self.is_lent = False
        reader = self._expect(request)
        self._unsent = pieces_after(self._unsent, sent)
        self.is_connected = self.is_connected or sent > 0
        if self.is_connected:
            self._events = _BOTH if self._unsent else select.POLLIN
        if received:
            reader.buffers()[0][: len(received)] = received
            reader.received(len(received))
        rest = filled - (len(received) - head_nbytes) if filled else 0
        if rest:
            reader.received(rest)
        return reader.reply

    def handle_events(self, events: int) -> Reply | None:
        """Make progress after `events`. Return the reply once it is complete."""
        if not self.is_connected and not self._finish_connecting():
            return None
        if events & ~select.POLLOUT:
            reply = self._receive()
            if reply is not None:
                return reply
        if self._unsent and not self._cannot_send and events & ~select.POLLIN:
            self._send_or_await_reply()
        return None

    def close(self) -> None:
        self.is_lent = False
        self._socket.close()

    def _expect(self, request: Request) -> ReplyReader:
        self._revocable = request.revocable
        self._unsent = [memoryview(request.head), *request.body]
        self._reader = ReplyReader(
            self._scratch,
            has_body=request.has_reply_body,
            into=request.into,
            into_nbytes=request.into_nbytes,
            revocable=request.revocable,
        )
        return self._reader

    # --- connecting ----------------------------------------------------------------------------------

    def _connect(self, address: Address) -> None:
        try:
            self._socket.connect(address.sockaddr)
        except BlockingIOError:
            return

    def _finish_connecting(self) -> bool:
        if not isinstance(self._socket, ssl.SSLSocket):
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if self._tls is not None:
                self._socket = self._tls.wrap_socket(
                    self._socket, server_hostname=self._host, do_handshake_on_connect=False
                )
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._events = select.POLLIN
                return False
            except ssl.SSLWantWriteError:
                self._events = select.POLLOUT
                return False
        self.is_connected = True
        self._events = _BOTH
        return True

    # --- sending -------------------------------------------------------------------------------------

    def _send_or_await_reply(self) -> None:
        """Send, or wait for the reply if the server stopped reading.

        A server may reply and close before it has read everything. Then the reply counts.
        """
        try:
            self._send()
        except (BrokenPipeError, ConnectionResetError):
            self._cannot_send = True
            self._events = select.POLLIN

    def _send(self) -> None:
        left = _TURN_NBYTES
        try:
            while self._unsent and left > 0:
                if self._revocable is not None:
                    sent = within_access(self._revocable, self._socket.send, self._unsent[0])
                elif isinstance(self._socket, ssl.SSLSocket):
                    sent = self._socket.send(self._unsent[0])
                else:
                    sent = self._socket.sendmsg(self._unsent[:IOV_MAX])
                self._unsent = pieces_after(self._unsent, sent)
                left -= sent
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._events = _BOTH
            return
        self._events = _BOTH if self._unsent else select.POLLIN

    # --- receiving -----------------------------------------------------------------------------------

    def _receive(self) -> Reply | None:
        reader = self._reader
        if reader is None:
            raise Malformed("the server sent data before it got a request")
        left = _TURN_NBYTES
        try:
            while reader.reply is None and (left > 0 or self._has_pending()):
                taken, may_be_more = self._receive_into(reader)
                if not may_be_more:
                    break
                left -= taken
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        return reader.reply

    def _receive_into(self, reader: ReplyReader) -> tuple[int, bool]:
        """Receive once. Return the number of bytes, and whether there may be more."""
        buffers = reader.buffers()
        if self._revocable is not None and reader.fills_page:
            taken = within_access(self._revocable, self._socket.recv_into, buffers[0])
        elif len(buffers) == 1 or isinstance(self._socket, ssl.SSLSocket):
            taken = self._socket.recv_into(buffers[0])
        else:
            taken = self._socket.recvmsg_into(buffers[:IOV_MAX])[0]
        more = taken >= len(buffers[0])
        reader.received(taken)
        return taken, more or isinstance(self._socket, ssl.SSLSocket)

    def _has_pending(self) -> bool:
        """Return True if TLS holds bytes that have left the socket. A poll does not report them."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0


class IdleConnections:
    """The idle connections of one process to one server, and the number of running calls.

    Unlike in a `ConnectionPool`, a call uses many connections at once, and never waits for one.
    Thread-safe.
    """

    def __init__(
        self, host: str, addresses: Addresses, tls: ssl.SSLContext | None, *, most_idle: int
    ) -> None:
        self._host = host
        self._addresses = addresses
        self._tls = tls
        self._most_idle = most_idle
        self._idle: list[Connection] = []
        self._gate = CallGate()

    def abandon(self) -> None:
        """Close the inherited idle connections in a forked child.

        The parent's connections stay open.
        """
        for connection in self._idle:
            connection.close()

    def begin_call(self) -> None:
        """Count a call that begins.

        Raises:
            StorageClosed: `close` was called.
        """
        if not self._gate.begin():
            self.ensure_open()

    def end_call(self) -> None:
        """Count a call that has ended and no longer holds a connection."""
        self._gate.end()

    def ensure_open(self) -> None:
        if self._gate.closed:
            raise StorageClosed("this S3Storage was closed: open a new one")

    @property
    def is_compiled(self) -> bool:
        """True if the compiled data plane may read and write the sockets."""
        return self._tls is None and native.implementation == "compiled"

    def take_idle(self, *, is_checked: bool = True) -> Connection | None:
        """Return the most recently used connection, or None if there is none.

        `is_checked`: skip connections that the server has closed. The data plane checks that
        itself.
        """
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            is_young = time.monotonic() - connection.last_progress_s < _KEPT_S
            if is_young and (not is_checked or connection.is_idle()):
                return connection
            connection.close()
        return None

    def connect(self, deadline: Deadline) -> tuple[Connection, Address]:
        """Return a new connection, which is still connecting.

        Raises:
            OSError: The connection can't be made.
            StorageUnavailable, StorageTimeout: The host has no address.
            StorageClosed: `close` was called in the meantime.
        """
        while not self._addresses.wait_until_known(min(_CLOSED_CHECK_S, deadline.remaining_s())):
            self.ensure_open()
            if deadline.passed():
                raise StorageTimeout(f"s3: the host {self._host} was not resolved in time")
        address = self._addresses.next()
        try:
            return Connection(address, self._tls, self._host), address
        except OSError:
            self._addresses.report_failure(address)
            raise

    def report_failure(self, address: Address) -> None:
        """Note that a connection to this address failed."""
        self._addresses.report_failure(address)

    def release(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it."""
        connection.was_used = True
        if connection.is_reusable and not self._gate.closed and len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Let running calls end, and close every connection."""
        self._gate.close()
        self._gate.wait_until_idle(_CLOSE_LIMIT_S)
        while self._idle:
            self._idle.pop().close()
