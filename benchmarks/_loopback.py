"""The limit of the sockets: a candidate that only moves the bytes of the pages over them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from _store import Memory, Store

if TYPE_CHECKING:
    from collections.abc import Callable


class Loopback(Store):
    """A store that only moves the bytes over several sockets, to and from a null server."""

    def __init__(self, port: int, source: Memory, destination: Memory, *, sockets: int = 1) -> None:
        super().__init__(source, destination)
        self.name = f"loopback, {sockets} socket{'s' * (sockets > 1)}"
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(sockets)]
        self._threads = ThreadPoolExecutor(sockets)

    def set(self) -> None:
        self._each(self._send, self.source)

    def get(self) -> None:
        self._each(self._receive, self.destination)

    def prove(self) -> None:
        """Do nothing, because the received bytes are arbitrary."""

    def close(self) -> None:
        self._threads.shutdown()
        for one in self._sockets:
            one.close()

    def _each(
        self, move: Callable[[socket.socket, list[memoryview]], None], memory: Memory
    ) -> None:
        step = -(-memory.pages // len(self._sockets))
        parts = [memory.views[at : at + step] for at in range(0, memory.pages, step)]
        list(self._threads.map(move, self._sockets, parts))

    def _send(self, one: socket.socket, views: list[memoryview]) -> None:
        one.sendall(b"SINK %d\r\n\r\n" % sum(map(len, views)))
        for view in views:
            one.sendall(view)
        one.recv(1)

    def _receive(self, one: socket.socket, views: list[memoryview]) -> None:
        one.sendall(b"SOURCE %d\r\n\r\n" % sum(map(len, views)))
        for view in views:
            at = 0
            while at < len(view):
                at += one.recv_into(view[at:])
