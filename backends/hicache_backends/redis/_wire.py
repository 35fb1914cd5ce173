"""redis-py's connections over a socket that keeps a deadline and takes pages without copying them.

redis-py resolves, connects, encrypts and authenticates. The one thing of it that is used and is not
public is the method `_connect` of its connections, which returns the socket.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

import redis.connection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_PIECES = 1024
"""Of one system call: IOV_MAX."""
_FEW_NBYTES = 1 << 14
_SLACK_S = 0.05
"""By so much may a system call go on beyond a deadline, so that limits are not set for every one."""
_TIMEVAL = struct.Struct("@ll")
_T = TypeVar("_T")
_CONNECT = "_connect"

if not hasattr(redis.connection.Connection, _CONNECT):
    raise ImportError(
        f"redis-py {redis.__version__} has no Connection._connect: install another release of redis",
        name="redis",
    )


class Deadline:
    """The end of a call as a whole."""

    __slots__ = ("_at_s",)

    def __init__(self, timeout_s: float) -> None:
        self._at_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: None are.
        """
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is up")
        return left_s

    def part(self, share: float) -> Deadline:
        """An earlier end: after this share of what is left."""
        return Deadline(self.left_s() * share)


class Wire:
    """A connected socket. No call of it, not even byte by byte, goes on beyond `deadline`.

    It is what redis-py has for a socket. Used by one thread at a time; any thread may `hang_up`.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self.deadline = deadline
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._asked_s: float | None = None
        self._armed_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    # --- as redis-py uses it ---------------------------------------------------------------------

    def settimeout(self, timeout_s: float | None) -> None:
        self._asked_s = timeout_s

    def recv(self, *arguments: Any) -> bytes:
        return self._in_time(self._socket.recv, *arguments)

    def recv_into(self, *arguments: Any) -> int:
        return self._in_time(self._socket.recv_into, *arguments)

    def sendall(self, data: Any) -> None:
        self.send_pieces([memoryview(data)])

    # --- as pages use it -------------------------------------------------------------------------

    def send_pieces(self, pieces: list[memoryview]) -> None:
        """Send all of these, in order."""
        if self._is_tls:
            pieces = _with_few_small(pieces)
        start = 0
        while start < len(pieces):
            if self._is_tls:
                sent = self._in_time(self._socket.send, pieces[start])
            else:
                given = pieces[start : start + _MOST_PIECES]
                sent = self._in_time(self._socket.sendmsg, given)
            start = _passed(pieces, start, sent)

    def receive(
        self, pieces: list[memoryview], least: int | None = None, *, eager: bool = False
    ) -> list[memoryview]:
        """Fill `pieces` in order, with `least` bytes or all; what is left of them.

        `eager`: return as soon as there are `least`; else wait for the others too, but not for ever.

        Raises:
            ConnectionResetError: The other side has ended the connection.
        """
        wanted = sum(map(len, pieces)) if least is None else least
        flags = 0 if eager else socket.MSG_WAITALL
        start = 0
        while wanted > 0:
            if self._is_tls:
                came = self._in_time(self._socket.recv_into, pieces[start])
            else:
                given = pieces[start : start + _MOST_PIECES]
                came = self._in_time(self._socket.recvmsg_into, given, 0, flags)[0]
            if came == 0:
                raise ConnectionResetError("the server ended the connection")
            start = _passed(pieces, start, came)
            wanted -= came
        return pieces[start:]

    def _in_time(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Make a system call that ends with the deadline.

        A plain socket blocks, with the kernel's own time limit: it moves a whole page in one call where
        one that does not block would be polled for every part of it.
        """
        left_s = self.deadline.left_s()
        if self._is_tls or self._asked_s is not None:
            self._armed_s = 0.0
            self._socket.settimeout(min(left_s, left_s if self._asked_s is None else self._asked_s))
        elif not left_s <= self._armed_s < left_s + _SLACK_S:
            self._limit(left_s)
        try:
            return call(*arguments)
        except BlockingIOError:
            if self._armed_s:
                raise TimeoutError("the time is up") from None
            raise

    def _limit(self, left_s: float) -> None:
        limit = _TIMEVAL.pack(*divmod(int(left_s * 1e6) + 1, 10**6))
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._armed_s = left_s

    def hang_up(self) -> None:
        """End it for both sides; a thread that waits in it is woken."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)


class _Timed:
    """What is put in front of a redis-py connection class."""

    deadline: Deadline
    wire: Wire | None = None
    _ended = False

    def hang_up(self) -> None:
        """End it for good, whatever it is doing; a thread that waits in it is woken."""
        self._ended = True
        if self.wire is not None:
            self.wire.hang_up()

    def _connect(self) -> Any:
        connection = cast("Any", self)
        left_s = self.deadline.left_s()
        connection.socket_connect_timeout = left_s
        connection.socket_timeout = left_s
        connect: Callable[[], socket.socket] = getattr(super(), _CONNECT)
        connected = connect()
        connection.socket_timeout = None
        self.wire = Wire(connected, self.deadline)
        if self._ended:
            connected.close()
            raise ConnectionAbortedError("it was ended while it connected")
        return self.wire


class TcpConnection(_Timed, redis.connection.Connection):
    """A redis-py connection whose socket is a `Wire`."""


class TlsConnection(_Timed, redis.connection.SSLConnection):
    """The same, encrypted."""


class UnixConnection(_Timed, redis.connection.UnixDomainSocketConnection):
    """The same, by a socket of the file system."""


def _passed(pieces: list[memoryview], start: int, nbytes: int) -> int:
    """The first piece that is not done after `nbytes` more; its beginning is cut off in place."""
    while nbytes:
        piece = pieces[start]
        if nbytes < len(piece):
            pieces[start] = piece[nbytes:]
            return start
        nbytes -= len(piece)
        start += 1
    return start


def _with_few_small(pieces: Sequence[memoryview]) -> list[memoryview]:
    """Neighbours that are small in one piece: each piece is a record of its own in TLS."""
    joined: list[memoryview] = []
    small: list[memoryview] = []
    for piece in pieces:
        if len(piece) < _FEW_NBYTES:
            small.append(piece)
            continue
        if small:
            joined.append(memoryview(b"".join(small)))
            small = []
        joined.append(piece)
    return [*joined, memoryview(b"".join(small))] if small else joined
