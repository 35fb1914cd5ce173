"""The thread that moves the bytes of a `FaultProxy`, or fails to move them as its mode says."""

from __future__ import annotations

import errno
import fcntl
import selectors
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_conformance.tools.network.flows import Connection, Counts, Flow, HangUp, Mode

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_CHUNK_NBYTES = 1 << 16
_DRIPS_PER_S = 50
_ANSWER_LIMIT_S = 30.0
_DRAIN_LIMIT_S = 2.0
_DRAIN_POLL_S = 0.001
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relay:
    """A loop that serves all connections. Other threads call only `call_in_loop` and `stop`."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.counts = Counts()
        self.mode = Mode()
        self._family, self._server_address = _resolved(*server)
        self._anchor = _bound(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._anchor.getsockname()
        self._listener: socket.socket | None = None
        self._connections: dict[Connection, None] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._run_calls)
        self._gate = threading.Lock()
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._stopping = False
        self._listen()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    def call_in_loop(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps of the loop, or now if it has ended. Return the result."""
        future: Future[T] = Future()
        with self._gate:
            running = not self._stopping
            if running:
                self._calls.append((future, action))
                self._wake_writer.send(b"\0")
        return future.result(_ANSWER_LIMIT_S) if running else action()

    def stop(self) -> None:
        """End the loop and all connections. Idempotent."""
        with self._gate:
            if not self._stopping:
                self._stopping = True
                self._wake_writer.send(b"\0")
        self._thread.join(_ANSWER_LIMIT_S)

    @property
    def stopped(self) -> bool:
        return self._stopping

    def behave(self, mode: Mode) -> None:
        """Switch to `mode`. After the end, do nothing."""
        if self._stopping:
            return
        self.mode = mode
        if mode.refusing:
            self._refuse()
        elif self._listener is None:
            self._listen()
        for connection in list(self._connections):
            connection.silenced = False
            if (
                connection.server_lost
                and not connection.down.finished
                and "down" not in mode.silent
            ):
                self._end(connection, reset=True)

    def held_nbytes(self) -> int:
        """Return how many bytes were received and not yet sent on."""
        return sum(flow.held_nbytes for each in self._connections for flow in each.flows)

    def drop_held(self) -> int:
        """Drop the held bytes and return their number."""
        return sum(flow.drop() for each in self._connections for flow in each.flows)

    # --- the loop --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                for connection in list(self._connections):
                    self._watch_all(connection)
                for key, events in self._selector.select(self._wait_s()):
                    key.data(events)
                for connection in list(self._connections):
                    for flow in connection.flows:
                        self._move(connection, flow)
        finally:
            self._close_all()

    def _run_calls(self, _: int) -> None:
        self._wake_reader.recv(4096)
        while self._calls:
            future, action = self._calls.popleft()
            try:
                future.set_result(action())
            except OSError as error:
                future.set_exception(error)

    def _close_all(self) -> None:
        with self._gate:
            self._stopping = True
            for future, _ in self._calls:
                future.set_exception(RuntimeError("the proxy was closed"))
            self._calls.clear()
        self._refuse()
        self._selector.close()
        for sock in (self._anchor, self._wake_reader, self._wake_writer):
            sock.close()

    def _wait_s(self) -> float | None:
        """Return the time until the next send, or None if only an event can cause one."""
        if any(connection.reset_peer for connection in self._connections):
            return _DRAIN_POLL_S
        dues = [
            due_s
            for connection in self._connections
            for flow in connection.flows
            if not self._is_silent(connection, flow)
            and (due_s := flow.due_s(self.mode)) is not None
        ]
        return max(0.0, min(dues) - time.monotonic()) if dues else None

    def _watch_all(self, connection: Connection) -> None:
        ends = (
            (connection.client, connection.up, connection.down),
            (connection.server, connection.down, connection.up),
        )
        for sock, incoming, outgoing in ends:
            if sock.fileno() < 0:
                continue
            events = selectors.EVENT_READ if incoming.listens else 0
            events |= selectors.EVENT_WRITE if outgoing.blocked else 0
            events = 0 if connection.reset_peer else events
            self._watch(sock, events, partial(self._serve, connection, incoming, outgoing))

    def _watch(self, sock: socket.socket, events: int, call: Callable[[int], None]) -> None:
        watched = self._selector.get_map().get(sock)
        if watched is None and events:
            self._selector.register(sock, events, call)
        elif watched is not None and not events:
            self._selector.unregister(sock)
        elif watched is not None and watched.events != events:
            self._selector.modify(sock, events, call)

    # --- connections -----------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener = _bound(self.address)
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _refuse(self) -> None:
        """Stop listening and reset all connections. The anchor keeps the port for this relay."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            self._end(connection, reset=True)

    def _accept(self, _: int) -> None:
        if self._listener is None:
            return
        try:
            client, _address = self._listener.accept()
        except OSError:
            return  # The client has gone again.
        server = socket.socket(self._family, socket.SOCK_STREAM)
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(client, server)
        self._connections[connection] = None
        self.counts.connections += 1
        if server.connect_ex(self._server_address) not in (0, errno.EINPROGRESS):
            self._end_broken(connection, server)

    def _end(self, connection: Connection, *, reset: bool) -> None:
        self._connections.pop(connection, None)
        for sock in (connection.client, connection.server):
            self._close(sock, reset=reset)

    def _close(self, sock: socket.socket, *, reset: bool) -> None:
        if sock.fileno() < 0:
            return
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._watch(sock, 0, self._run_calls)
        sock.close()

    def _end_broken(self, connection: Connection, sock: socket.socket) -> None:
        """End a connection one end of which is broken. A client of a silent proxy must not notice."""
        if sock is connection.server and self._is_silent(connection, connection.down):
            self._drop_server(connection)
        else:
            self._end(connection, reset=True)

    def _drop_server(self, connection: Connection) -> None:
        """Close the server's end. Any further bytes from the client are lost."""
        connection.server_lost = True
        connection.up.finished = True
        for flow in connection.flows:
            flow.drop()
        self._close(connection.server, reset=True)

    # --- bytes -----------------------------------------------------------------------------------

    def _is_silent(self, connection: Connection, flow: Flow) -> bool:
        return connection.silenced or flow.direction in self.mode.silent

    def _is_moving(self, connection: Connection, flow: Flow) -> bool:
        """Return whether a connection is open and its mode lets this direction pass."""
        alive = connection in self._connections and not connection.reset_peer
        return alive and not self._is_silent(connection, flow)

    def _serve(self, connection: Connection, incoming: Flow, outgoing: Flow, events: int) -> None:
        """Serve one end of a connection that is ready."""
        if connection not in self._connections:
            return
        if events & selectors.EVENT_WRITE:
            if outgoing is connection.up and connection.connecting:
                connection.connecting = False
                if connection.server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._end_broken(connection, connection.server)
                    return
            outgoing.blocked = False
        if events & selectors.EVENT_READ and incoming.source.fileno() >= 0:
            self._receive(connection, incoming)

    def _receive(self, connection: Connection, flow: Flow) -> None:
        try:
            data = flow.source.recv(_CHUNK_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            self._end_broken(connection, flow.source)
            return
        if connection.server_lost:
            if not data:
                self._end(connection, reset=False)
        elif not data:
            flow.ended = True
        else:
            self._record_arrival(connection, flow)
            flow.take(data)
            if flow.direction == "up" and self.mode.hang_up is not None:
                self._hang_up(connection, self.mode.hang_up)

    def _hang_up(self, connection: Connection, fault: HangUp) -> None:
        """Reset the client if it is its turn. Hold its request until the mode changes."""
        if fault.left_requests:
            fault.left_requests -= 1
            return
        self.mode = Mode()
        connection.silenced = connection.up.ended = True
        self._close(connection.client, reset=True)

    def _record_arrival(self, connection: Connection, flow: Flow) -> None:
        """Count a round trip, and silence the connection if the mode says so."""
        if flow.direction == "up":
            self.counts.turns += connection.last_direction == "down"
            if self.mode.silence_next:
                connection.silenced = True
                self.mode = Mode()
        connection.last_direction = flow.direction

    def _move(self, connection: Connection, flow: Flow) -> None:
        """Send on the bytes that are due."""
        if connection.reset_peer and connection in self._connections:
            self._end_drained(connection)
        while self._is_moving(connection, flow):
            due_s = flow.due_s(self.mode)
            if due_s is None or due_s > time.monotonic():
                return
            if not flow.held:
                self._finish(connection, flow)
                return
            try:
                self._send(connection, flow)
            except BlockingIOError:
                flow.blocked = True
            except OSError:
                self._end_broken(connection, flow.sink)

    def _send(self, connection: Connection, flow: Flow) -> None:
        self._flip(flow)
        piece = flow.held[0][1]
        most, sent = len(piece), 0
        cut = self.mode.cut
        if cut is not None and cut.direction == flow.direction:
            most = min(most, cut.left_nbytes)
        if self.mode.nbytes_per_s:
            most = min(most, max(1, int(self.mode.nbytes_per_s / _DRIPS_PER_S)))
            flow.next_s = time.monotonic() + most / self.mode.nbytes_per_s
        if most:
            sent = flow.sink.send(piece[:most])
            flow.sent(sent)
            self.counts.nbytes[flow.direction] += sent
        if self.mode.flip is not None and self.mode.flip.direction == flow.direction:
            self.mode.flip.left_nbytes -= sent
        if cut is not None and cut.direction == flow.direction:
            cut.left_nbytes -= sent
            if not cut.left_nbytes and cut.silences:
                self.mode = Mode(silent=frozenset(("up", "down")))
            elif not cut.left_nbytes:
                self._cut(connection, flow, orderly=cut.orderly)

    def _flip(self, flow: Flow) -> None:
        """Damage the piece that is sent next if the mode says so, then pass through."""
        flip = self.mode.flip
        if flip is None or flip.direction != flow.direction:
            return
        arrived_s, piece = flow.held[0]
        if flip.left_nbytes >= len(piece):
            return
        damaged = bytearray(piece)
        damaged[flip.left_nbytes] ^= 1 << flip.left_nbytes % 8
        flow.held[0] = arrived_s, bytes(damaged)
        self.mode = Mode()
        self.counts.flips += 1

    def _cut(self, connection: Connection, flow: Flow, *, orderly: bool) -> None:
        self.mode = Mode()
        if orderly:
            self.counts.cuts += 1
            self._drop_server(connection)
            self._finish(connection, connection.down)
        else:
            connection.reset_peer = flow.sink
            connection.reset_by_s = time.monotonic() + _DRAIN_LIMIT_S
            self._end_drained(connection)

    def _end_drained(self, connection: Connection) -> None:
        """Reset a connection once its last bytes have arrived: an earlier reset would overtake them."""
        assert connection.reset_peer is not None
        late = time.monotonic() >= connection.reset_by_s
        if late or not _nbytes_on_the_way(connection.reset_peer):
            self.counts.cuts += 1
            self._end(connection, reset=True)

    def _finish(self, connection: Connection, flow: Flow) -> None:
        """Send the end of the flow to the sink."""
        flow.finished = True
        with suppress(OSError):
            flow.sink.shutdown(socket.SHUT_WR)
        if connection.up.finished and connection.down.finished and not connection.server_lost:
            self._end(connection, reset=False)


def _nbytes_on_the_way(sock: socket.socket) -> int:
    """Return how many sent bytes the peer's system has not acknowledged."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def _bound(address: tuple[str, int]) -> socket.socket:
    """Return a socket at `address`. Several may share the address as long as at most one listens."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setblocking(False)
    sock.bind(address)
    return sock


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and the address of a server. Prefer IPv4."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address
