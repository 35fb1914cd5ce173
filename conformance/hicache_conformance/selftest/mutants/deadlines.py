"""Wrong stores: what they wait for longer than a call may take."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import (
    NEVER,
    Connection,
    Deadline,
    Message,
    Operation,
)
from hicache_storage.errors import HiCacheError, StorageTimeout

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_LONG_S = 600.0


@caught_by(
    "KV-304:steps_that_are_each_in_time_do_not_add_up",
    seen_in="redis backend of this project, mended",
)
class TimesOutPerStep(WireStore):
    """Each page of a batch is a round trip, and each round trip has a timeout of its own."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        alone = super()._present
        return [alone(space, [one])[0] for one in hashes]


@caught_by(
    "KV-304:a_signal_does_not_prolong_a_call", seen_in="redis backend of this project, mended"
)
class BeginsAnewAfterASignal(WireStore):
    """Its timeout is the socket's own (SO_RCVTIMEO), which begins anew when a signal interrupts it."""

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        vars(connection)["receive"] = partial(self._received, connection)
        return connection

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        seconds = deadline.left_s() or 0.0
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        vars(connection)["_socket"].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        try:
            return Connection.receive(connection, NEVER)
        except BlockingIOError as error:
            raise TimeoutError("no answer in time") from error


class _Patient(WireStore):
    """Can wait for a reply for as long as it takes."""

    def _exchanged_at_leisure(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        request = Message(next(self._numbers), operation, parts)
        with self._translated():
            connection = self._lease(request.number, NEVER)
            connection.send(request, NEVER)
            reply = connection.receive(NEVER)
            self._give_back(request.number, connection)
        return reply.parts


@caught_by("KV-901:a_bounded_get_ends_in_time_and_lets_go_of_its_pages")
class FillsPagesInTheBackground(_Patient):
    """It claims to be bounded: a get that is late goes on in a thread, and fills its pages there."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        answers: list[list[bool]] = []

        def run() -> None:
            with suppress(HiCacheError):
                answers.append(
                    super(FillsPagesInTheBackground, self).batch_get(space, hashes, pages)
                )

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._settings.timeout_s)
        if not answers:
            raise StorageTimeout("no answer in time")
        return answers[0]

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        if operation != Operation.GET:
            return super()._exchange(operation, *parts)
        return self._exchanged_at_leisure(operation, *parts)


@caught_by("KV-901:a_bounded_set_ends_in_time_and_lets_go_of_its_pages")
class WaitsForItsWrites(_Patient):
    """It claims to be bounded, and a set waits for as long as the server takes."""

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        if operation != Operation.SET:
            return super()._exchange(operation, *parts)
        return self._exchanged_at_leisure(operation, *parts)


class _Locked(Shelf):
    """One file is locked while pages are set, by whatever process."""

    @contextmanager
    def _locked(self) -> Generator[None, None, None]:
        descriptor = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@caught_by("KV-304:a_process_that_stops_in_a_set_holds_nobody_up", seen_in="an author's LMDB store")
class LocksWithoutADeadline(_Locked):
    """A set locks the store against other processes while it copies its pages; they wait for ever."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        with self._locked():
            return super().batch_set(space, hashes, pages)


@caught_by("KV-304:a_process_that_is_stopped_holds_nobody_up")
class LocksItsWritesWithoutADeadline(_Locked):
    """A set locks the store against other processes while it writes; they wait for ever."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        with self._locked():
            return super()._write_whole(space, page_hash, data)


@caught_by("KV-304:a_call_that_has_to_wait_ends_in_time")
class WaitsForOtherWriters(SqliteStore):
    """A database that others write to is waited for much longer than `timeout_s`."""

    def _prepare(self, database: sqlite3.Connection) -> None:
        super()._prepare(database)
        database.execute(f"PRAGMA busy_timeout = {int(_LONG_S * 1000)}")
