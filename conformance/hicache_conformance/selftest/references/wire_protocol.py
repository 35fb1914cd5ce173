"""The messages between `WireStore` and `WireServer`, and a connection that carries them.

A message is a header (a mark, a number, an operation, how many parts), the length of each part, and the
parts. A reply has its request's number. One request, one reply.

    PING                                        ->
    OPEN     space, manifest                    ->
    EXISTS   space, hash...                     -> verdicts
    GET      space, hash...                     -> page...      empty: a miss
    SET      space, manifest, (hash, page)...   -> verdicts
    DELETE   space, hash...                     -> verdicts
    SPACES                                      -> manifest...
    SCAN     space                              -> (hash, length in decimal)...
    LIMIT    name, bytes in decimal             ->                for spaces called NAME@...
    SYNC     space                              ->                its pages survive a power cut

SPACES with a part answers about the spaces whose names begin with it.

Verdicts are one part, one byte each: 1 for True, 0 for False.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEADER = struct.Struct("!4sQBI")
_MARK = b"wire"


class Operation(enum.IntEnum):
    """The operation of a request. The reply repeats it."""

    PING = 0
    OPEN = 1
    EXISTS = 2
    GET = 3
    SET = 4
    DELETE = 5
    SPACES = 6
    SCAN = 7
    LIMIT = 8
    SYNC = 9


@dataclass(frozen=True, slots=True)
class Message:
    """A request or a reply."""

    number: int
    operation: int
    parts: Sequence[bytes] = ()

    def packed(self) -> bytes:
        """Return the bytes of the message."""
        header = _HEADER.pack(_MARK, self.number, self.operation, len(self.parts))
        lengths = struct.pack(f"!{len(self.parts)}Q", *map(len, self.parts))
        return b"".join([header, lengths, *self.parts])


class Deadline:
    """The deadline of a whole call, or no deadline for None."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Return how many seconds are left, or None without a deadline.

        Raises:
            TimeoutError: No time is left.
        """
        if self._at_s is None:
            return None
        left_s = self._at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time is up")
        return left_s


NEVER = Deadline(None)


class Connection:
    """A socket that carries messages. One thread uses it at a time; any thread may call `hang_up`.

    Every method raises OSError if the other side has gone, or the time is over.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, deadline: Deadline = NEVER) -> None:
        self._socket.settimeout(deadline.left_s())
        self._socket.sendall(message.packed())

    def receive(self, deadline: Deadline = NEVER) -> Message:
        """Wait for a complete message and return it."""
        mark, number, operation, count = _HEADER.unpack(self._exactly(_HEADER.size, deadline))
        if mark != _MARK:
            raise ConnectionAbortedError("the other side uses a different protocol")
        lengths = struct.unpack(f"!{count}Q", self._exactly(8 * count, deadline))
        parts = [self._exactly(length, deadline) for length in lengths]
        return Message(number, operation, parts)

    def is_quiet(self) -> bool:
        """Return True if neither bytes nor the end of the connection have arrived."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def hang_up(self) -> None:
        """End the connection for both sides, and wake a thread that waits for it."""
        with suppress(OSError):  # the other side has already ended it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, nbytes: int, deadline: Deadline) -> bytes:
        received = bytearray(nbytes)
        rest = memoryview(received)
        while rest:
            self._socket.settimeout(deadline.left_s())
            count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionResetError("the other side has hung up")
            rest = rest[count:]
        return bytes(received)
