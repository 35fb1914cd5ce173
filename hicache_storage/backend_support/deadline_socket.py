"""Sockets that keep a deadline, encrypted or not, and move the bytes of pages without a copy."""

from __future__ import annotations

import errno
import io
import os
import select
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage import native
from hicache_storage.backend_support.revocable import RevokedError, within_access
from hicache_storage.backend_support.vectored_io import IOV_MAX, pieces_after
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.resolver import SocketAddress
    from hicache_storage.page import Revocable

_MIN_TIMEOUT_S = 0.001
"""Not 0, because a timeout of 0 makes a socket non-blocking."""
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_SMALL_NBYTES = 1 << 14
_MS = 1000
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_T = TypeVar("_T")


def connect(addresses: Sequence[SocketAddress], deadline: Deadline) -> socket.socket:
    """Connect to the first address that answers. Return the socket.

    Each attempt gets an equal share of the time that is left. The time left afterwards becomes the
    timeout of the socket, for a handshake.

    Raises:
        OSError: No address can be reached. The error of the last address is raised.
    """
    failure = OSError("there is no address")
    for tried, (family, address) in enumerate(addresses):
        plain = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                for option in _TCP_OPTIONS:
                    plain.setsockopt(*option)
            _set_timeout(plain, deadline.remaining_s() / (len(addresses) - tried))
            plain.connect(address[0] if family == socket.AF_UNIX else address)
            _set_timeout(plain, deadline.remaining_s())
        except OSError as error:
            plain.close()
            failure = error
        except BaseException:
            plain.close()
            raise
        else:
            return plain
    raise failure


def _set_timeout(plain: socket.socket, timeout_s: float) -> None:
    plain.settimeout(max(_MIN_TIMEOUT_S, timeout_s))


class DeadlineSocket:
    """A connected socket. No call on it lasts longer than `deadline`, even if bytes arrive one by one.

    redis-py can use it as its socket. Only one thread at a time may use it, but any thread may call
    `shut_down`.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self.deadline: Deadline = deadline
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._never_waits = False
        self._poller = select.poll()
        connected.setblocking(False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def reader(self) -> io.BufferedReader:
        """Return a reader for the replies to one call. It raises what `receive_into` raises."""
        return io.BufferedReader(_Arrivals(self))

    # --- methods that a ConnectionPool calls -----------------------------------------------------

    def prepare(self, deadline: Deadline) -> bool:
        """Set the deadline of the next call. Return False if bytes have arrived, or the end."""
        self.deadline = deadline
        try:
            self._socket.recv(1)
        except _NOT_READY:
            return True
        except OSError:
            return False
        return False

    def shut_down(self) -> None:
        """End the connection for both sides. Wake up a thread that waits on the socket."""
        with suppress(OSError):  # the server may have ended it already
            # SSLSocket.shutdown would end encryption first. The thread that uses the socket could
            # then send unencrypted bytes before the connection ends.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket, and send nothing. Idempotent."""
        self._socket.close()

    # --- methods that redis-py calls -------------------------------------------------------------

    def settimeout(self, timeout_s: float | None) -> None:
        """With 0, make calls raise instead of wait. Ignore any other value: `deadline` counts."""
        self._never_waits = timeout_s == 0

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        return self._when(select.POLLIN, self._socket.recv, nbytes, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        return self._when(select.POLLIN, self._socket.recv_into, buffer, nbytes)

    def sendall(self, data: Any) -> None:
        self.send_buffers([memoryview(data)])

    # --- methods that move pages -----------------------------------------------------------------

    @property
    def is_compiled(self) -> bool:
        """True if the compiled data plane may read and write the socket."""
        return not self._is_tls and native.implementation == "compiled"

    def send_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Send all of `buffers`, in order."""
        for joined in _join_small(buffers):
            buffer = joined
            while buffer:
                buffer = buffer[self._when(select.POLLOUT, self._socket.send, buffer) :]

    def receive_into(
        self, buffers: list[memoryview], minimum: int | None = None
    ) -> list[memoryview]:
        """Fill `buffers` in order, with at least `minimum` bytes or in full. Return the unfilled rest.

        Raises:
            ConnectionResetError: The server has ended the connection.
        """
        missing = sum(map(len, buffers)) if minimum is None else minimum
        left = pieces_after(buffers, 0)
        while missing > 0:
            if self._is_tls:
                received = self.recv_into(left[0])
            else:
                some = left[:IOV_MAX]
                received = self._when(select.POLLIN, self._socket.recvmsg_into, some)[0]
            if received == 0:
                raise self.error_of(errno.ECONNRESET)
            left = pieces_after(left, received)
            missing -= received
        return left

    def send_within(self, revocable: Revocable, memory: memoryview) -> bool:
        """Send all of `memory`, within accesses. Return False if it is revoked before its last byte."""
        send = self._socket.send
        try:
            while memory:
                memory = memory[
                    self._when(select.POLLOUT, within_access, revocable, send, memory) :
                ]
        except RevokedError:
            return False
        return True

    def receive_within(self, revocable: Revocable, memory: memoryview) -> bool:
        """Fill `memory`, within accesses. If it is revoked, lose what is left, and return False."""
        receive = self._socket.recv_into
        while memory:
            try:
                received = self._when(select.POLLIN, within_access, revocable, receive, memory)
            except RevokedError:
                self._lose(len(memory))
                return False
            if received == 0:
                raise self.error_of(errno.ECONNRESET)
            memory = memory[received:]
        return True

    def _lose(self, nbytes: int) -> None:
        lost = memoryview(bytearray(min(nbytes, _SMALL_NBYTES)))
        while nbytes:
            step = min(nbytes, len(lost))
            self.receive_into([lost[:step]])
            nbytes -= step

    def error_of(self, code: int) -> OSError:
        """Return the exception for an errno from the data plane."""
        if code == errno.ETIMEDOUT:
            return StorageTimeout(f"the server did not answer within {self.deadline.timeout_s:g} s")
        if code == errno.ECONNRESET:
            return ConnectionResetError("the server ended the connection")
        return OSError(code, os.strerror(code))

    def _when(self, event: int, call: Callable[..., _T], *arguments: Any) -> _T:
        """Make a call once the socket is ready for it, and return its result.

        Raises:
            StorageTimeout: The socket was not ready in time.
        """
        while True:
            left_s = self.deadline.remaining_s()
            if left_s == 0.0 and not self._never_waits:
                raise self.error_of(errno.ETIMEDOUT)
            try:
                return call(*arguments)
            except _NOT_READY as error:
                if self._never_waits:
                    raise
                if isinstance(error, ssl.SSLWantReadError):
                    event = select.POLLIN
                elif isinstance(error, ssl.SSLWantWriteError):
                    event = select.POLLOUT
            self._poller.register(self._socket, event)
            self._poller.poll(left_s * _MS)


class _Arrivals(io.RawIOBase):
    """What arrives at a socket. The end of the connection is an error, never a short read."""

    def __init__(self, connected: DeadlineSocket) -> None:
        self._socket = connected

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        into = [memoryview(buffer)]
        return len(into[0]) - sum(map(len, self._socket.receive_into(into, 1)))


def _join_small(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Join small neighboring buffers, because each buffer costs a call and a TLS record."""
    joined: list[memoryview] = []
    small: list[memoryview] = []
    for buffer in buffers:
        if len(buffer) < _SMALL_NBYTES:
            small.append(buffer)
            continue
        if small:
            joined.append(memoryview(b"".join(small)))
            small = []
        joined.append(buffer)
    return [*joined, memoryview(b"".join(small))] if small else joined
