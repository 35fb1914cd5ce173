"""A store behind a TCP server: `WireStore` and `WireServer`.

You can run the server as a program: `python -m hicache_conformance.selftest.references.wire --port
0`. It prints its port, and serves until it is killed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hicache_conformance.selftest.references.plain import PlainStore
from hicache_conformance.selftest.references.wire_protocol import (
    Connection,
    Deadline,
    Message,
    Operation,
)
from hicache_conformance.selftest.references.wire_server import WireServer
from hicache_conformance.selftest.references.wire_settings import WireSettings
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.storage import Capabilities, Durability, PageInfo, Retention

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

__all__ = ["WireServer", "WireSettings", "WireStore", "main"]

_CLOSE_LIMIT_S = 10.0


class WireStore(PlainStore):
    """A store in which each call is one request and one reply, over a few connections.

    It never uses a connection again after a failure.

    Its own methods, in the order of a call: `_exchange` is the round trip; `_lease` finds or makes
    a connection; `_is_fresh` tests a kept connection; `_check` refuses the reply of another
    request; `_give_back` keeps the connection for the next call, `_after_failure` closes it;
    `_translated` turns errors of sockets into errors of the contract.
    """

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=4,
        max_batch=256,
        bounded=True,
    )
    _settings_class: ClassVar[type[WireSettings]] = WireSettings

    def __init__(self, settings: WireSettings) -> None:
        super().__init__()
        self._settings = settings
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection | None] = {}
        """Connections in use, by the number of the request. None: the connection is being made."""
        self.narrow(parallelism=settings.parallelism)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        store = cls(cls._settings_class.parse("wire", config))
        try:
            store._greet()
        except BaseException:
            store.close()
            raise
        return store

    def _greet(self) -> None:
        """Send the first request, to find out when the store opens whether the server is there."""
        self._exchange(Operation.PING)

    def close(self) -> None:
        if self.is_forked_copy:  # a close here would end the connections of the parent
            super().close()
            return
        with self._changed:
            super().close()
            for connection in (*self._idle, *self._busy.values()):
                if connection is not None:
                    connection.hang_up()
            self._drop_idle()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy, _CLOSE_LIMIT_S)

    # --- requests --------------------------------------------------------------------------------------

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._judged(Operation.EXISTS, space, *map(str.encode, hashes))

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        parts = self._about(Operation.GET, space, *map(str.encode, hashes))
        return [data if self._is_whole(space, data) else None for data in parts]

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        named = zip(map(str.encode, hashes), contents, strict=True)
        items = [part for pair in named for part in pair]
        return self._judged(Operation.SET, space, _manifest(space), *items)

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._judged(Operation.DELETE, space, *map(str.encode, hashes))

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        return self._contents(space, [page_hash])[0]

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        return self._store(space, [page_hash], [data])[0]

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        return self._remove(space, [page_hash])[0]

    def _remember(self, space: KeySpace) -> bool:
        self._about(Operation.OPEN, space, _manifest(space))
        return True

    def _known_spaces(self) -> list[KeySpace]:
        manifests = self._exchange(Operation.SPACES)
        return [KeySpace.from_manifest(json.loads(manifest)) for manifest in manifests]

    def _names(self, space: KeySpace) -> list[PageInfo]:
        parts = self._about(Operation.SCAN, space)
        return [
            PageInfo(page_hash.decode(), int(nbytes))
            for page_hash, nbytes in zip(parts[::2], parts[1::2], strict=True)
        ]

    def _judged(self, operation: Operation, space: KeySpace, *parts: bytes) -> list[bool]:
        (verdicts,) = self._about(operation, space, *parts)
        return [bool(verdict) for verdict in verdicts]

    def _about(self, operation: Operation, space: KeySpace, *parts: bytes) -> Sequence[bytes]:
        return self._exchange(operation, space.id.encode(), *parts)

    # --- a round trip ----------------------------------------------------------------------------------

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        """Send a request and return the parts of its reply."""
        request = Message(next(self._numbers), operation, parts)
        deadline = Deadline(self._settings.timeout_s)
        with self._translated():
            connection = self._lease(request.number, deadline)
            try:
                connection.send(request, deadline)
                reply = connection.receive(deadline)
                self._check(request, reply)
            except BaseException:
                self._after_failure(request.number, connection)
                raise
            self._give_back(request.number, connection)
        return reply.parts

    def _check(self, request: Message, reply: Message) -> None:
        if (reply.number, reply.operation) != (request.number, request.operation):
            raise ConnectionAbortedError("the server answered another request")

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            self.ensure_open()  # `close` ends running calls
            kind = StorageTimeout if isinstance(error, TimeoutError) else StorageUnavailable
            host, port = self._settings.address
            raise kind(f"wire: {host}:{port}: {error}") from error

    # --- connections -----------------------------------------------------------------------------------

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        """Return a connection for one request, either a kept one or a new one."""
        with self._changed:
            if not self._changed.wait_for(self._has_turn, deadline.left_s()):
                raise TimeoutError("all connections are in use")
            self.ensure_open()
            while self._idle:
                connection = self._idle.pop()
                if self._is_fresh(connection):
                    self._busy[number] = connection
                    return connection
                connection.close()
            self._busy[number] = None
        try:
            return self._connected(number, deadline)
        except BaseException:
            self._done(number)
            raise

    def _has_turn(self) -> bool:
        return self._closed or len(self._busy) < self._settings.parallelism

    def _is_fresh(self, connection: Connection) -> bool:
        """Return True if no byte has come on an idle connection since its last reply."""
        return connection.is_quiet()

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        connected = socket.create_connection(self._settings.address, timeout=deadline.left_s())
        connection = Connection(connected)
        with self._changed:
            self._busy[number] = connection
            if self._closed:
                connection.hang_up()
        return connection

    def _give_back(self, number: int, connection: Connection) -> None:
        with self._changed:
            if self._closed:
                connection.close()
            else:
                self._idle.append(connection)
            self._done(number)

    def _after_failure(self, number: int, connection: Connection) -> None:
        """Drop the connection, and the idle ones too, because the server may have gone."""
        with self._changed:
            connection.close()
            self._drop_idle()
            self._done(number)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _done(self, number: int) -> None:
        with self._changed:  # the lock of a condition is reentrant
            del self._busy[number]
            self._changed.notify_all()


def _manifest(space: KeySpace) -> bytes:
    return json.dumps(space.manifest()).encode()


def main() -> None:
    """Serve until the process is killed."""
    parser = argparse.ArgumentParser(description="the server of the wire store")
    parser.add_argument("--port", type=int, default=0, help="0: a free one, which is printed")
    with WireServer(parser.parse_args().port) as server:
        sys.stdout.write(f"{server.address[1]}\n")
        sys.stdout.flush()
        threading.Event().wait()


if __name__ == "__main__":
    main()
