"""What a `FaultProxy` carries, what it has counted, and how it is to behave."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import socket

Direction: TypeAlias = Literal["up", "down"]
"""Up: from the client to the server."""

_MAX_HELD_NBYTES = 4 << 20
"""What is taken in for one direction of one connection; more waits at its sender."""


@dataclass
class Cut:
    """The end of one connection, in the middle of what it carries."""

    direction: Direction
    left_nbytes: int
    orderly: bool


@dataclass(frozen=True)
class Mode:
    """How the relay behaves. The default: as if it were not there."""

    refusing: bool = False
    silent: frozenset[Direction] = frozenset()
    silence_next: bool = False
    """The next connection to carry a request is silent from then on."""
    delay_s: float = 0.0
    nbytes_per_s: float | None = None
    cut: Cut | None = None


@dataclass
class Counts:
    """What has happened so far."""

    connections: int = 0
    cuts: int = 0
    turns: int = 0
    nbytes: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})


@dataclass(eq=False)
class Flow:
    """One direction of one connection: what was received and not yet sent on."""

    direction: Direction
    source: socket.socket
    sink: socket.socket
    held: deque[tuple[float, bytes]] = field(default_factory=deque[tuple[float, bytes]])
    """Pieces, and when they arrived."""
    held_nbytes: int = 0
    next_s: float = 0.0
    """When more may be sent, where bytes drip."""
    blocked: bool = False
    """The sink takes no more for now."""
    ended: bool = False
    """The source has said its last."""
    finished: bool = False
    """So has the sink been told."""

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
        """When the sink is to be told something; None where there is nothing, or it does not listen."""
        if self.finished or self.blocked or not (self.held or self.ended):
            return None
        due_s = self.next_s if mode.nbytes_per_s and self.held else 0.0
        return max(due_s, self.held[0][0] + mode.delay_s) if mode.delay_s and self.held else due_s


class Connection:
    """A client, the server, and what passes between them."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.up = Flow("up", client, server, blocked=True)  # until the server has answered
        self.down = Flow("down", server, client)
        self.last_direction: Direction = "down"
        self.silenced = False
        self.connecting = True
        self.server_lost = False
        """The server is gone, and the client may not know yet, or has been told with an orderly end."""
        self.reset_peer: socket.socket | None = None
        """Whom the last bytes before a reset were sent to: until they have arrived, nothing moves."""
        self.reset_by_s = 0.0

    @property
    def flows(self) -> tuple[Flow, Flow]:
        return self.up, self.down
