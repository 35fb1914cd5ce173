"""A socket that keeps a deadline and takes pages without copying them, under redis-py's connections.

redis-py authenticates, selects and reads replies that carry no page. The one thing of it that is used
and is not public is the method `_connect` of its connections, which gives them the socket.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import redis.connection

from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.deadline import Deadline

_MOST_PIECES = 1024
"""Of one system call: IOV_MAX."""
_FEW_NBYTES = 1 << 14
_SLACK_S = 0.05
"""By so much may a system call go on beyond a deadline, so that limits are not set for every one."""
_TIMEVAL = struct.Struct("@ll")
_MS = 1000
_CONNECT = "_connect"
_T = TypeVar("_T")

if not hasattr(redis.connection.Connection, _CONNECT):
    raise ImportError(
        f"redis-py {redis.__version__} has no Connection._connect: install another release of redis",
        name="redis",
    )


class Wire:
    """A connected socket. No call of it, not even byte by byte, goes on beyond `deadline`.

    It is what redis-py has for a socket. Used by one thread at a time; any thread may `hang_up`.

    A plain socket is polled with the time that is left, which a signal does not prolong; then one call
    that blocks moves as much as a page. A signal cannot restart that call, with all of its time again:
    there is something to move, so that the call returns with a part. The rest of a reply whose head has
    come is taken without a poll: mostly it is there.
    """

    def __init__(self, connected: socket.socket, deadline: Deadline) -> None:
        self.deadline = deadline
        self._socket = connected
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        self._asked_s: float | None = None
        self._armed_s = 0.0
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connected, select.POLLIN)
        self._writable.register(connected, select.POLLOUT)
        # The kernel's limit is that of a call over TCP, of each of its many parts in a socket of files.
        self._send_flags = socket.MSG_DONTWAIT if connected.family == socket.AF_UNIX else 0
        if not self._is_tls:
            connected.settimeout(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    # --- as redis-py uses it ---------------------------------------------------------------------

    def settimeout(self, timeout_s: float | None) -> None:
        self._asked_s = timeout_s

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        if self._is_tls:
            return bytes(self._in_time(self._socket.recv, nbytes, flags))
        return self._came(self._socket.recv, nbytes, flags | socket.MSG_DONTWAIT)

    def recv_into(self, buffer: Any, nbytes: int = 0) -> int:
        if self._is_tls:
            return int(self._in_time(self._socket.recv_into, buffer, nbytes))
        return self._came(self._socket.recv_into, buffer, nbytes, socket.MSG_DONTWAIT)

    def sendall(self, data: Any) -> None:
        self.send_pieces([memoryview(data)])

    # --- as pages use it -------------------------------------------------------------------------

    def send_pieces(self, pieces: list[memoryview]) -> None:
        """Send all of these, in order."""
        if self._is_tls:
            for piece in _with_few_small(pieces):
                self._send_encrypted(piece)
            return
        start = 0
        while start < len(pieces):
            self._wait(self._writable)
            with suppress(BlockingIOError):  # it was limited by an earlier deadline
                sent = self._socket.sendmsg(
                    pieces[start : start + _MOST_PIECES], (), self._send_flags
                )
                start = _passed(pieces, start, sent)

    def receive(
        self, pieces: list[memoryview], least: int | None = None, *, eager: bool = False
    ) -> list[memoryview]:
        """Fill `pieces` in order, with `least` bytes or all; return what is left of them.

        `eager`: take what is there already, and return as soon as there are `least`; else wait for the
        others too, but not for ever.

        Raises:
            ConnectionResetError: The other side has ended the connection.
        """
        wanted = sum(map(len, pieces)) if least is None else least
        flags = 0 if eager else socket.MSG_WAITALL
        start, at_once = 0, eager
        while wanted > 0:
            if self._is_tls:
                came = int(self._in_time(self._socket.recv_into, pieces[start]))
            else:
                came = self._receive(pieces[start : start + _MOST_PIECES], flags, at_once=at_once)
                at_once = False
                if came < 0:
                    continue
            if came == 0:
                raise ConnectionResetError("the server ended the connection")
            start = _passed(pieces, start, came)
            wanted -= came
        return pieces[start:]

    def hang_up(self) -> None:
        """End it for both sides; a thread that waits in it is woken."""
        with suppress(OSError):  # the other side was first
            # Not the method of SSLSocket: it ends encryption first, and the thread that uses the socket
            # might send in clear before the connection ends.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    # --- plain -----------------------------------------------------------------------------------

    def _came(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Receive what there is, and wait for something unless redis-py asked not to."""
        while True:
            if self._asked_s is None:
                self._wait(self._readable)
            try:
                return call(*arguments)
            except BlockingIOError:
                if self._asked_s is not None:
                    raise

    def _receive(self, pieces: list[memoryview], flags: int, *, at_once: bool) -> int:
        """Return how many bytes came; less than 0 where none did, and there may be time left."""
        try:
            if at_once:
                return self._socket.recvmsg_into(pieces, 0, socket.MSG_DONTWAIT)[0]
            self._wait(self._readable)
            return self._socket.recvmsg_into(pieces, 0, flags)[0]
        except BlockingIOError:
            return -1

    def _wait(self, ready: select.poll) -> None:
        """Return when the socket is ready; limit the system calls that follow.

        Raises:
            StorageTimeout: It was not ready in time.
        """
        left_s = self.deadline.remaining_s()
        if left_s == 0.0 or not ready.poll(left_s * _MS):
            raise self._too_late()
        if not left_s / 2 <= self._armed_s <= left_s + _SLACK_S:
            self._limit(left_s)

    def _limit(self, left_s: float) -> None:
        limit = _TIMEVAL.pack(*divmod(int(left_s * 1e6) + 1, 10**6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._armed_s = left_s

    # --- encrypted -------------------------------------------------------------------------------

    def _send_encrypted(self, piece: memoryview) -> None:
        while piece:
            piece = piece[int(self._in_time(self._socket.send, piece)) :]

    def _in_time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make a call of Python's, which keeps its timeout whatever signals come."""
        left_s = self.deadline.remaining_s()
        if left_s == 0.0:
            raise self._too_late()
        self._socket.settimeout(left_s if self._asked_s is None else min(left_s, self._asked_s))
        try:
            return call(*arguments)
        except TimeoutError:
            raise self._too_late() from None

    def _too_late(self) -> StorageTimeout:
        return StorageTimeout(f"the server did not answer within {self.deadline.timeout_s:g} s")


class _Wired:
    """What is put in front of a redis-py connection class: it has its socket given."""

    wire: Wire | None = None

    def _connect(self) -> Any:
        if self.wire is None:
            raise ConnectionAbortedError("it was ended while it connected")
        return self.wire


class TcpConnection(_Wired, redis.connection.Connection):
    """A redis-py connection whose socket is a `Wire`, encrypted or not."""


class UnixConnection(_Wired, redis.connection.UnixDomainSocketConnection):
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
