"""Sockets that keep a deadline: connecting, TLS, and pages that are sent and received without a copy."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage import native
from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from hicache_backends.redis.access import Address
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.resolver import SocketAddress

_MIN_TIMEOUT_S = 0.001
"""A timeout of 0 would make the socket non-blocking."""
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_SMALL_NBYTES = 1 << 14
_MS = 1000
_T = TypeVar("_T")


# --- connecting ----------------------------------------------------------------------------------


def dial(address: Address, context: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    """Return a socket that is connected to `address`, encrypted if there is a `context`.

    Raises:
        StorageTimeout: The name server, the server or its TLS did not answer in time.
        OSError: The server cannot be reached, or its certificate is refused.
    """
    plain = _connect_any(address, deadline)
    if context is None:
        return plain
    try:
        return _encrypt(plain, context, address, deadline)
    except BaseException:
        plain.close()
        raise


def _connect_any(address: Address, deadline: Deadline) -> socket.socket:
    """Try every address of the host. Each attempt gets an equal share of the time that is left."""
    if address.path is not None:
        candidates: list[SocketAddress] = [(socket.AF_UNIX, (address.path,))]
    else:
        candidates = RESOLVER.addresses(address.host, address.port, deadline)
    failure = OSError("there is no address")
    for index, candidate in enumerate(candidates):
        share_s = deadline.remaining_s() / (len(candidates) - index)
        try:
            return _connect(*candidate, share_s)
        except OSError as error:
            failure = error
    if isinstance(failure, TimeoutError):
        raise StorageTimeout(
            f"connecting to {address} did not end within {deadline.timeout_s:g} s"
        ) from None
    raise ConnectionError(f"cannot connect to {address}: {failure.strerror or failure}") from None


def _connect(family: int, address: tuple[Any, ...], timeout_s: float) -> socket.socket:
    plain = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            for option in _TCP_OPTIONS:
                plain.setsockopt(*option)
        plain.settimeout(max(_MIN_TIMEOUT_S, timeout_s))
        plain.connect(address[0] if family == socket.AF_UNIX else address)
    except BaseException:
        plain.close()
        raise
    return plain


def _encrypt(
    plain: socket.socket, context: ssl.SSLContext, address: Address, deadline: Deadline
) -> ssl.SSLSocket:
    plain.settimeout(max(_MIN_TIMEOUT_S, deadline.remaining_s()))
    try:
        return context.wrap_socket(plain, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        raise ConnectionError(
            f"the certificate of {address} is refused: {error.verify_message}"
        ) from None
    except TimeoutError:
        raise StorageTimeout(
            f"the TLS handshake with {address} did not end within {deadline.timeout_s:g} s. Does the"
            " server speak TLS at this port? Without it the scheme is redis://"
        ) from None
    except ssl.SSLError as error:
        hint = ""
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
            hint = ". The server does not speak TLS at this port: without it the scheme is redis://"
        raise ConnectionError(
            f"the TLS handshake with {address} failed: {error.reason or error}{hint}"
        ) from None
    except OSError as error:
        raise ConnectionError(
            f"the TLS handshake with {address} failed: {error.strerror or error}. Does the server"
            " speak TLS at this port? Without it the scheme is redis://"
        ) from None
    except ValueError:
        raise ConnectionError(f"no certificate can name the host of {address}") from None


# --- sending and receiving -----------------------------------------------------------------------


class DeadlineSocket:
    """A connected socket. No call on it exceeds `deadline`, even if bytes arrive one at a time.

    redis-py uses it as its socket. One thread at a time may use it; any thread may call `shut_down`.

    The data plane moves the bytes of a plain socket: one call sends or receives many pieces without the
    interpreter lock. Python's `ssl` moves those of an encrypted one.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self.deadline = deadline
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._timeout_s: float | None = None
        """The timeout that redis-py has set."""
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        if not self._is_tls:
            connected.settimeout(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    # --- as redis-py uses it ---------------------------------------------------------------------

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        if self._is_tls:
            return bytes(self._call_tls(self._socket.recv, nbytes, flags))
        return self._call_when_readable(self._socket.recv, nbytes, flags | socket.MSG_DONTWAIT)

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        if self._is_tls:
            return int(self._call_tls(self._socket.recv_into, buffer, nbytes))
        return self._call_when_readable(self._socket.recv_into, buffer, nbytes, socket.MSG_DONTWAIT)

    def sendall(self, data: Any) -> None:
        self.send_buffers([memoryview(data)])

    # --- as pages use it -------------------------------------------------------------------------

    def send_buffers(self, buffers: list[memoryview]) -> None:
        """Send all of `buffers`, in order."""
        if self._is_tls:
            for buffer in _join_small(buffers):
                self._send_encrypted(buffer)
            return
        self._checked(native.send_pieces(self._socket.fileno(), buffers, self.deadline.end_s))

    def receive_into(
        self, buffers: list[memoryview], minimum: int | None = None
    ) -> list[memoryview]:
        """Fill `buffers` in order, with at least `minimum` bytes or all. Return the unfilled rest.

        Raises:
            ConnectionResetError: The server has ended the connection.
        """
        missing = sum(map(len, buffers)) if minimum is None else minimum
        start = 0
        while missing > 0:
            if self._is_tls:
                received = int(self._call_tls(self._socket.recv_into, buffers[start]))
                if received == 0:
                    raise ConnectionResetError("the server ended the connection")
            else:
                received = self._checked(
                    native.receive_pieces(
                        self._socket.fileno(), buffers, missing, self.deadline.end_s
                    )
                )
            start = _advance(buffers, start, received)
            missing -= received
        return buffers[start:]

    def fetch_bulks(
        self,
        requests: Sequence[bytes],
        sent: int,
        head: bytes,
        pages: Sequence[Sequence[memoryview]],
        window: int,
    ) -> tuple[list[int], int, bytes]:
        """Send requests and receive a page each; see `native.fetch_bulks`. For plain sockets only."""
        return native.fetch_bulks(
            self._socket.fileno(), requests, sent, head, pages, window, self.deadline.end_s
        )

    def exchange_lines(
        self, requests: Sequence[Sequence[Buffer]], replies: Sequence[int], window: int
    ) -> tuple[int, bytes]:
        """Send requests and receive lines; see `native.exchange_lines`. For plain sockets only."""
        return native.exchange_lines(
            self._socket.fileno(), requests, replies, window, self.deadline.end_s
        )

    @property
    def is_plain(self) -> bool:
        """True if the data plane may read and write the socket."""
        return not self._is_tls

    def error_of(self, code: int) -> OSError:
        """Return the exception for an errno of the data plane."""
        if code == errno.ETIMEDOUT:
            return self._timeout()
        if code == errno.ECONNRESET:
            return ConnectionResetError("the server ended the connection")
        return OSError(code, os.strerror(code))

    def shut_down(self) -> None:
        """End the connection for both sides. A thread that waits in it wakes up."""
        with suppress(OSError):  # the server may have ended it before
            # SSLSocket.shutdown ends encryption first. The thread that uses the socket could then send
            # unencrypted bytes before the connection ends.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # --- plain -----------------------------------------------------------------------------------

    def _call_when_readable(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Receive the available bytes. Wait for some, unless redis-py has set a timeout."""
        while True:
            if self._timeout_s is None:
                self._wait(self._readable)
            try:
                return call(*arguments)
            except BlockingIOError:
                if self._timeout_s is not None:
                    raise

    def _checked(self, result: int) -> int:
        if result < 0:
            raise self.error_of(-result)
        return result

    def _wait(self, ready: select.poll) -> None:
        """Return when the socket is ready.

        Raises:
            StorageTimeout: The socket was not ready in time.
        """
        left_s = self.deadline.remaining_s()
        if left_s == 0.0 or not ready.poll(left_s * _MS):
            raise self._timeout()

    # --- encrypted -------------------------------------------------------------------------------

    def _send_encrypted(self, buffer: memoryview) -> None:
        while buffer:
            buffer = buffer[int(self._call_tls(self._socket.send, buffer)) :]

    def _call_tls(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of Python's socket. Python keeps its timeout when signals arrive."""
        left_s = self.deadline.remaining_s()
        if left_s == 0.0:
            raise self._timeout()
        self._socket.settimeout(left_s if self._timeout_s is None else min(left_s, self._timeout_s))
        try:
            return call(*arguments)
        except TimeoutError:
            raise self._timeout() from None

    def _timeout(self) -> StorageTimeout:
        return StorageTimeout(f"the server did not answer within {self.deadline.timeout_s:g} s")


def _advance(buffers: list[memoryview], start: int, nbytes: int) -> int:
    """Return the index of the first unfinished buffer after `nbytes` more, which is cut in place."""
    while nbytes:
        buffer = buffers[start]
        if nbytes < len(buffer):
            buffers[start] = buffer[nbytes:]
            return start
        nbytes -= len(buffer)
        start += 1
    return start


def _join_small(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return `buffers` with small neighbours joined: TLS makes one record of each buffer."""
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
