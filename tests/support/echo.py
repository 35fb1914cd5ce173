"""An echo server behind a proxy that may fail."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable
from typing import Any, Self, cast

from hicache_conformance.tools.network.proxy import FaultProxy

LIMIT_S = 20.0


class EchoServer(socketserver.ThreadingTCPServer):
    """A server that sends back all bytes and records them."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Echo)
        self.received = bytearray()
        self.endings: list[str] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.address: tuple[str, int] = self.socket.getsockname()
        """The address on which the server listens."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.endings.append("error")


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = cast("EchoServer", self.server)
        ending = "end"
        try:
            while data := self._read():
                server.received += data
                if ending == "end":
                    ending = self._answer(data)
        except ConnectionError:
            ending = "reset"
        server.endings.append(ending)

    def _read(self) -> bytes:
        cast("EchoServer", self.server).may_read.wait(LIMIT_S)
        return bytes(self.request.recv(65536))

    def _answer(self, data: bytes) -> str:
        """Send the answer. Return "reset" if the connection accepts none; more may be left to read."""
        try:
            self.request.sendall(data)
        except ConnectionError:
            return "reset"
        return "end"


class Client:
    """One connection. Each of its calls gives up in time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, LIMIT_S)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self, nbytes: int) -> bytes:
        """Return `nbytes` bytes, or fewer if the connection ends."""
        received = bytearray()
        while len(received) < nbytes:
            part = self.socket.recv(nbytes - len(received))
            if not part:
                break
            received += part
        return bytes(received)

    def echo(self, data: bytes) -> bytes:
        self.send(data)
        return self.receive(len(data))

    def ending(self) -> str:
        """Return how the connection ends, or "data" if there is more to read before."""
        try:
            return "end" if self.socket.recv(1) == b"" else "data"
        except ConnectionResetError:
            return "reset"

    def is_silent(self, for_s: float = 0.1) -> bool:
        self.socket.settimeout(for_s)
        try:
            self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(LIMIT_S)
        return False


class ProxiedEcho:
    """The server, the proxy and their connections, which are closed together."""

    def __init__(self) -> None:
        self.server = EchoServer()
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        self.proxy = FaultProxy(self.server.address)
        self._clients: list[Client] = []

    def connect(self) -> Client:
        self._clients.append(Client(self.proxy.address))
        return self._clients[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.socket.close()
        self.proxy.close()
        self.stop_server()

    def stop_server(self) -> None:
        """Stop the server and its listener. Idempotent."""
        self.server.shutdown()
        self._thread.join(LIMIT_S)
        self.server.server_close()


def until(condition: Callable[[], object]) -> None:
    """Wait for `condition`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that in time"
        time.sleep(0.002)
