"""A key-value server for `WireStore`: threads, and a dict that outlives `stop`."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Self

from hicache_conformance.selftest.references.wire_protocol import Connection, Message, Operation
from hicache_storage.keys import KeySpace

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOST = "127.0.0.1"
_JOIN_LIMIT_S = 10.0


class WireServer:
    """A server on 127.0.0.1. It keeps its pages and its port over `stop` and `start`, until `close`.

    `with WireServer() as server:` starts and closes it. One thread at a time may call the methods.
    """

    def __init__(self, port: int = 0) -> None:
        self._place = _bound(port)
        """This socket never listens. It only keeps others off the port while the server is stopped."""
        self.address: tuple[str, int] = self._place.getsockname()
        self._table = _Table()
        self._life: _Life | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL for the settings of `WireStore`."""
        host, port = self.address
        return f"wire://{host}:{port}"

    def start(self) -> None:
        """Listen, on the same port after each stop. Do nothing if the server already listens."""
        if self._life is None:
            self._life = _Life(_bound(self.address[1]), self._table)

    def stop(self) -> None:
        """Stop as if the server were killed: connections end, and new ones are refused. Idempotent."""
        if self._life is not None:
            self._life.end()
            self._life = None

    def pause(self) -> None:
        """Pause as on SIGSTOP: the server accepts connections and reads requests, but answers none."""
        if self._life is not None:
            self._life.going.clear()

    def resume(self) -> None:
        """Continue, and answer the requests that have come meanwhile."""
        if self._life is not None:
            self._life.going.set()

    def cut_power(self) -> None:
        """Stop, lose everything that was not synced, and start again."""
        self.stop()
        self._table.forget_unsynced()
        self.start()

    @property
    def held(self) -> int:
        """How many requests wait for `resume`."""
        return self._life.held if self._life is not None else 0

    def close(self) -> None:
        """Stop the server and free its port. Idempotent."""
        self.stop()
        self._place.close()


class _Life:
    """What a server has between a start and a stop: a listener, connections, and a thread for each."""

    def __init__(self, listener: socket.socket, table: _Table) -> None:
        self.going = threading.Event()
        self.going.set()
        self.held = 0
        self._table = table
        self._listener = listener
        self._lock = threading.Lock()
        self._ended = False
        self._open: dict[Connection, threading.Thread] = {}
        self._listener.listen(128)
        self._acceptor = threading.Thread(target=self._accept, name="wire server", daemon=True)
        self._acceptor.start()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            handlers = list(self._open.values())
            for connection in self._open:
                connection.hang_up()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self.going.set()
        for thread in (self._acceptor, *handlers):
            thread.join(_JOIN_LIMIT_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(accepted)
            with self._lock:
                if self._ended:
                    connection.close()
                    return
                handler = threading.Thread(
                    target=self._serve, args=(connection,), name="wire connection", daemon=True
                )
                self._open[connection] = handler
                handler.start()

    def _hold(self) -> None:
        """Wait while the server is paused."""
        with self._lock:
            self.held += 1
        self.going.wait()
        with self._lock:
            self.held -= 1

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                request = connection.receive()
                self._hold()
                if self._ended:
                    return  # a killed server does nothing more
                parts = self._table.answer(request)
                connection.send(Message(request.number, request.operation, parts))
        except (OSError, ValueError, IndexError):
            return  # the client has gone, or uses another protocol
        finally:
            with self._lock:
                del self._open[connection]
                connection.close()


class _Table:
    """The pages, and the operations on them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._manifests: dict[bytes, bytes] = {}
        self._pages: dict[bytes, dict[bytes, bytes]] = {}
        self._limits: dict[bytes, int] = {}
        self._synced: dict[bytes, tuple[bytes, dict[bytes, bytes]]] = {}
        """What a disk would have: the manifest and the pages of each synced key space."""

    def forget_unsynced(self) -> None:
        """Return to what was synced last."""
        with self._lock:
            self._manifests = {space_id: one for space_id, (one, _) in self._synced.items()}
            self._pages = {space_id: dict(pages) for space_id, (_, pages) in self._synced.items()}

    def answer(self, request: Message) -> Sequence[bytes]:
        """Execute a request at once and as a whole, and return the parts of its reply."""
        parts = request.parts
        with self._lock:
            match request.operation:
                case Operation.OPEN:
                    self._manifests[parts[0]] = parts[1]
                case Operation.SPACES:
                    named = b"".join(parts)
                    return [one for key, one in self._manifests.items() if key.startswith(named)]
                case Operation.LIMIT:
                    self._limits[parts[0]] = int(parts[1])
                case Operation.SYNC:
                    pages = self._pages.get(parts[0], {})
                    self._synced[parts[0]] = self._manifests.get(parts[0], b""), dict(pages)
                case Operation.SET:
                    return [self._set(parts[0], parts[1], parts[2:])]
                case Operation.EXISTS | Operation.GET | Operation.DELETE | Operation.SCAN:
                    return self._asked(request.operation, self._pages.get(parts[0], {}), parts[1:])
                case _:
                    pass  # a ping, or an operation of a later version
        return []

    def _asked(
        self, operation: int, pages: dict[bytes, bytes], hashes: Sequence[bytes]
    ) -> list[bytes]:
        if operation == Operation.SCAN:
            named = [(page_hash, str(len(data)).encode()) for page_hash, data in pages.items()]
            return [part for pair in named for part in pair]
        if operation == Operation.GET:
            return [pages.get(page_hash, b"") for page_hash in hashes]
        if operation == Operation.DELETE:
            for page_hash in hashes:
                pages.pop(page_hash, None)
            return [bytes([True] * len(hashes))]
        return [bytes(page_hash in pages for page_hash in hashes)]

    def _set(self, space_id: bytes, manifest: bytes, items: Sequence[bytes]) -> bytes:
        nbytes = KeySpace.from_manifest(json.loads(manifest)).stored_nbytes
        self._manifests[space_id] = manifest
        pages = self._pages.setdefault(space_id, {})
        verdicts = bytearray()
        for page_hash, data in zip(items[::2], items[1::2], strict=True):
            more = len(data) - len(pages.get(page_hash, b""))
            verdicts.append(len(data) == nbytes and self._has_room(space_id, more))
            if verdicts[-1]:
                pages[page_hash] = data
        return bytes(verdicts)

    def _has_room(self, space_id: bytes, more: int) -> bool:
        name, mark, _ = space_id.partition(b"@")
        if name not in self._limits or not mark:
            return True
        spaces = (pages for key, pages in self._pages.items() if key.startswith(name + mark))
        return (
            sum(len(data) for pages in spaces for data in pages.values()) + more
            <= self._limits[name]
        )


def _bound(port: int) -> socket.socket:
    """Return a socket that is bound to a port, which other sockets may share if they do not listen."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((_HOST, port))
    except OSError:
        bound.close()
        raise
    return bound
