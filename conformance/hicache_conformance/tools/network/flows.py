"""The connections of a `FaultProxy`, its counters and its mode."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import socket

Direction: TypeAlias = Literal["up", "down"]
"""The direction of bytes. "up" is from the client to the server."""

_MAX_HELD_NBYTES = 4 << 20
"""One direction of one connection holds at most this many bytes. More bytes wait at their sender."""


@dataclass
class Cut:
    """A fault that ends one connection in the middle of its bytes."""

    direction: Direction
    left_nbytes: int
    orderly: bool
    silences: bool = False
    """True: no connection is ended, but nothing passes any more."""


@dataclass
class Flip:
    """A fault that inverts one bit in the middle of one connection's bytes."""

    direction: Direction
    left_nbytes: int
    """How many bytes pass before the one that is damaged."""


@dataclass
class HangUp:
    """A fault that ends the client's side of one connection, and delivers its request later."""

    left_requests: int
    """How many pieces of requests pass before."""


@dataclass(frozen=True)
class Mode:
    """How the relay behaves. By default every byte passes through."""

    refusing: bool = False
    silent: frozenset[Direction] = frozenset()
    silence_next: bool = False
    """True silences the next connection that carries a request."""
    delay_s: float = 0.0
    nbytes_per_s: float | None = None
    cut: Cut | None = None
    flip: Flip | None = None
    hang_up: HangUp | None = None


@dataclass
class Counts:
    """The counters of a proxy."""

    connections: int = 0
    cuts: int = 0
    flips: int = 0
    turns: int = 0
    nbytes: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})


@dataclass(eq=False)
class Flow:
    """One direction of one connection, with the bytes that were received and not yet sent on."""

    direction: Direction
    source: socket.socket
    sink: socket.socket
    held: deque[tuple[float, bytes]] = field(default_factory=deque[tuple[float, bytes]])
    """Pieces of data with the time when each arrived."""
    held_nbytes: int = 0
    next_s: float = 0.0
    """When to send next if bytes drip."""
    blocked: bool = False
    """True while the sink takes no more bytes."""
    ended: bool = False
    """True once the source has sent its last byte."""
    finished: bool = False
    """True once the sink has received the end."""

    def take(self, data: bytes) -> None:
        self.held.append((time.monotonic(), data))
        self.held_nbytes += len(data)

    def sent(self, nbytes: int) -> None:
        arrived_s, piece = self.held.popleft()
        if nbytes < len(piece):
            self.held.appendleft((arrived_s, piece[nbytes:]))
        self.held_nbytes -= nbytes

    def drop(self) -> int:
        dropped, self.held_nbytes = self.held_nbytes, 0
        self.held.clear()
        return dropped

    @property
    def listens(self) -> bool:
        return not self.ended and self.held_nbytes < _MAX_HELD_NBYTES

    def due_s(self, mode: Mode) -> float | None:
        """Return when to send next, or None if nothing can be sent."""
        if self.finished or self.blocked or not (self.held or self.ended):
            return None
        due_s = self.next_s if mode.nbytes_per_s and self.held else 0.0
        return max(due_s, self.held[0][0] + mode.delay_s) if mode.delay_s and self.held else due_s


class Connection:
    """A client, its server, and the two flows between them."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        # The flow stays blocked until the server has answered.
        self.up = Flow("up", client, server, blocked=True)
        self.down = Flow("down", server, client)
        self.last_direction: Direction = "down"
        self.silenced = False
        self.connecting = True
        self.server_lost = False
        """True: the server is gone, and the client has not noticed or has received an orderly end."""
        self.reset_peer: socket.socket | None = None
        """Who receives the last bytes before a reset. Nothing moves until they have arrived."""
        self.reset_by_s = 0.0

    @property
    def flows(self) -> tuple[Flow, Flow]:
        return self.up, self.down
