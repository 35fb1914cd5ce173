"""Wrong stores that fail when a network or server fails, or after it is back; KV-304, KV-305."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.mutants import caught_by, own
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
from hicache_conformance.selftest.references.wire_settings import WireSettings
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import PageInfo, StorageStats


class _ForTheBeginning(Deadline):
    """A deadline that limits only the first wait. Later waits have no limit."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._asked = False

    def left_s(self) -> float | None:
        asked, self._asked = self._asked, True
        return NEVER.left_s() if asked else super().left_s()


class _Wrapped(WireStore):
    """A wire store whose subclasses can change connections when they are leased."""

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        vars(connection)["receive"] = partial(self._received, connection)
        return connection

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        return Connection.receive(connection, deadline)


# --- KV-304 ------------------------------------------------------------------------------------------


@caught_by(
    "KV-304:a_server_that_drips_is_a_timeout", "KV-304:silence_in_the_middle_of_a_reply_is_an_error"
)
class WaitsForTheRest(_Wrapped):
    """The timeout covers only the beginning of a reply; the wait for the rest has no limit."""

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        del deadline
        return super()._received(connection, _ForTheBeginning(self._settings.timeout_s))


@caught_by("KV-304:connections_that_break_late_do_not_prolong_a_call")
class BeginsAnewWithEachConnection(WireStore):
    """If a connection breaks, the call tries another one, and its time begins anew."""

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        until_s = time.monotonic() + 2 * self._settings.timeout_s
        while True:
            try:
                return super()._exchange(operation, *parts)
            except StorageTimeout:
                raise
            except StorageUnavailable:
                if time.monotonic() > until_s:
                    raise


@caught_by("KV-304:a_server_that_does_not_accept_is_an_error_in_time")
class ConnectsWithoutATimeout(WireStore):
    """Connecting has no timeout."""

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        del deadline
        return super()._connected(number, NEVER)


@caught_by("KV-304:calls_that_wait_for_a_connection_are_in_time")
class QueuesWithoutATimeout(_Wrapped):
    """The time that a call waits for a connection does not count toward its timeout."""

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        del deadline
        connection = super()._lease(number, NEVER)
        vars(connection)["send"] = partial(self._sent, connection)
        return connection

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        del deadline
        return super()._connected(number, Deadline(self._settings.timeout_s))

    def _sent(self, connection: Connection, message: Message, deadline: Deadline) -> None:
        del deadline
        Connection.send(connection, message, Deadline(self._settings.timeout_s))

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        del deadline
        return super()._received(connection, Deadline(self._settings.timeout_s))


@caught_by("KV-304:a_large_set_to_a_silent_server_is_a_timeout")
class SendsWithoutATimeout(_Wrapped):
    """The timeout is for the reply only, so a request that the server does not read is sent forever."""

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        vars(connection)["send"] = partial(self._sent, connection)
        return connection

    def _sent(self, connection: Connection, message: Message, deadline: Deadline) -> None:
        del deadline
        Connection.send(connection, message)


@caught_by("KV-304:no_other_call_hangs_or_raises_what_is_foreign")
class AsksForItsStats(WireStore):
    """Stats asks the server, so an engine's metrics wait and fail with it."""

    def stats(self) -> StorageStats:
        self._exchange(Operation.PING)
        return super().stats()


@caught_by(
    "KV-304:a_server_that_refuses_is_unavailable", "KV-304:a_server_that_stops_is_unavailable"
)
class MissesWhenUnreachable(WireStore):
    """If the server can't be reached, every page is a miss."""

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        try:
            return super()._present(space, hashes)
        except StorageUnavailable:
            return [False] * len(hashes)


@caught_by("KV-304:a_server_that_is_paused_is_a_timeout")
class CallsSilenceUnavailable(WireStore):
    """A server that accepts and never answers is reported as one that can't be reached."""

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            with super()._translated():
                yield
        except StorageTimeout as error:
            raise StorageUnavailable(str(error)) from error


def _must_have_been_connected(error: StorageUnavailable) -> None:
    """Raise `error` again if nothing was sent, because then the error is the right answer."""
    if isinstance(error.__cause__, ConnectionRefusedError):
        raise error


@caught_by("KV-304:a_set_whose_connection_breaks_tells_the_truth")
class SetsWithoutLooking(_Wrapped):
    """A set that was sent returns True, whatever becomes of its reply."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except StorageUnavailable as error:
            _must_have_been_connected(error)
            return [True] * len(hashes)


@caught_by("KV-304:a_reply_cut_short_is_no_hit")
class FillsUpWhatIsMissing(_Wrapped):
    """If a reply breaks off, the rest is what the page held before: zeros, or another page."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        try:
            return super()._contents(space, hashes)
        except StorageUnavailable as error:
            _must_have_been_connected(error)
            return [bytes(space.stored_nbytes)] * len(hashes)


@caught_by("KV-304:close_does_not_wait_for_a_silent_server")
class SaysGoodbye(WireStore):
    """Close sends a last request to the server, and waits for the reply."""

    def close(self) -> None:
        if not self._closed and self._busy:
            threading.Event().wait(13.0)
        super().close()


# --- KV-204 ------------------------------------------------------------------------------------------


@caught_by("KV-204:round_trips_do_not_grow_with_the_pages_of_a_batch")
class WritesPageByPage(WireStore):
    """Set makes a round trip for each page."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        alone = super()._store
        pairs = zip(hashes, contents, strict=True)
        return [alone(space, [one], [data])[0] for one, data in pairs]


@caught_by("KV-204:round_trips_grow_with_the_batches")
class RemembersEveryBatch(WireStore):
    """Each batch also asks again for all batches before it."""

    _batches = 0

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        for _ in range(self._batches):
            self._exchange(Operation.PING)
        self._batches += len(hashes) > 1
        return super()._present(space, hashes)


@caught_by("KV-304:a_listing_that_never_came_is_no_empty_one")
class ListsNothingWhenLate(WireStore):
    """If the server does not answer, a listing is empty."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        try:
            return super()._names(space)
        except HiCacheError:
            return []


@caught_by("KV-304:a_silent_server_is_a_timeout")
class RefusesWhenLate(WireStore):
    """If the server does not answer, a set returns False, although its page may show later."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except HiCacheError:
            return [False] * len(hashes)


# --- deadlines -----------------------------------------------------------------------------------


_LONG_S = 600.0
_AGAIN_AFTER_S = 0.5
"""After its store's next time-out and before the check ends."""


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
    """The timeout is the socket's own (SO_RCVTIMEO), which starts again when a signal interrupts it."""

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
    """A store that can wait for a reply as long as it takes."""

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
    """The store claims to be bounded, but a late get goes on in a thread and fills its pages there."""

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
    """The store claims to be bounded, but a set waits as long as the server takes."""

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        if operation != Operation.SET:
            return super()._exchange(operation, *parts)
        return self._exchanged_at_leisure(operation, *parts)


class _Locked(Shelf):
    """A store whose processes all lock one file while they set pages."""

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
    """A set locks out other processes while it copies its pages, and they wait without a limit."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        with self._locked():
            return super().batch_set(space, hashes, pages)


@caught_by("KV-304:a_process_that_is_stopped_holds_nobody_up")
class LocksItsWritesWithoutADeadline(_Locked):
    """A set locks out other processes while it writes, and they wait without a limit."""

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        with self._locked():
            return super()._write_whole(space, page_hash, data)


@caught_by("KV-304:a_call_that_has_to_wait_ends_in_time")
class WaitsForOtherWriters(SqliteStore):
    """A call waits much longer than `timeout_s` for others that write to the database."""

    def _prepare(self, database: sqlite3.Connection) -> None:
        super()._prepare(database)
        database.execute(f"PRAGMA busy_timeout = {int(_LONG_S * 1000)}")


@caught_by("KV-304:a_delete_that_waited_in_vain_is_not_true", says="still there")
class DeletesIfItIsNotBusy(SqliteStore):
    """A delete returns True also if another process held the database until the time was over."""

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        with suppress(StorageTimeout):
            super()._removed(space, page_hash)
        return True


# --- when the network or the server is back ------------------------------------------------------


class _Reusing(WireStore):
    """A store that keeps using connections that have failed. A subclass decides which ones."""

    _asked: threading.local = own(threading.local)
    _reused: set[Connection] = own(set)

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        self._asked.operation = operation
        return super()._exchange(operation, *parts)

    def _is_fresh(self, connection: Connection) -> bool:
        return connection in self._reused or super()._is_fresh(connection)

    def _after_failure(self, number: int, connection: Connection) -> None:
        if connection in self._reused or self._reuses(sys.exception()):
            self._reused.add(connection)
            self._give_back(number, connection)
        else:
            super()._after_failure(number, connection)

    def _drop_idle(self) -> None:
        kept = [] if self._closed else [one for one in self._idle if one in self._reused]
        self._idle = [one for one in self._idle if one not in kept]
        super()._drop_idle()
        self._idle = kept

    def _reuses(self, error: BaseException | None) -> bool:
        raise NotImplementedError


@caught_by(
    "KV-305:it_works_again_after_replies_were_cut_short",
    seen_in="redis backend of this project, mended",
)
class KeepsBrokenConnections(_Reusing):
    """A connection that was reset goes back into the pool, and fails forever."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, ConnectionError)


@caught_by("KV-305:gets_that_time_out_use_up_no_connection", says="does not work again")
class LosesConnectionsThatTimedOut(WireStore):
    """A get that times out on a connection that was used before never ends its turn in the pool."""

    _known: set[Connection] = own(set)

    def _give_back(self, number: int, connection: Connection) -> None:
        self._known.add(connection)
        super()._give_back(number, connection)

    def _after_failure(self, number: int, connection: Connection) -> None:
        if isinstance(sys.exception(), TimeoutError) and connection in self._known:
            connection.close()
        else:
            super()._after_failure(number, connection)


@caught_by("KV-006:a_refused_page_whose_request_comes_late_never_shows", says="returned False")
class LooksUpWhatItSent(WireStore):
    """If the connection of a set breaks, the verdicts are those of a lookup over another one."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except StorageUnavailable:
            return self._present(space, hashes)


@caught_by("KV-305:a_late_page_is_not_taken_for_a_later_one")
class TakesLateReplies(_Reusing):
    """A connection whose get timed out is used again, and the late reply is taken for the next reply."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, TimeoutError) and self._asked.operation == Operation.GET

    def _check(self, request: Message, reply: Message) -> None:
        if reply.operation != Operation.GET:
            super()._check(request, reply)


@caught_by(
    "KV-305:a_late_page_is_not_taken_for_one_that_is_awaited",
    seen_in="planted in the redis backend of this project",
)
class TakesTheReplyThatComes(TakesLateReplies):
    """As `TakesLateReplies`, but a connection on which a late reply has come already is dropped."""

    def _is_fresh(self, connection: Connection) -> bool:
        return connection.is_quiet()


@caught_by(
    "KV-305:a_page_of_an_interrupted_get_is_not_taken_for_a_later_one",
    seen_in="redis-py 4.5.3, asyncio (CVE-2023-28859)",
)
class KeepsInterruptedConnections(TakesLateReplies):
    """A connection is dropped after an Exception, but kept after a KeyboardInterrupt or SystemExit."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, (KeyboardInterrupt, SystemExit))


@caught_by("KV-305:a_late_verdict_is_not_taken_for_a_later_one")
class TakesLateVerdicts(_Reusing):
    """If `exists` times out, its connection is used again, and the next call gets the late verdict."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, TimeoutError) and self._asked.operation == Operation.EXISTS

    def _check(self, request: Message, reply: Message) -> None:
        if reply.operation != Operation.EXISTS:
            super()._check(request, reply)


@caught_by("KV-305:it_works_again_after_silence_whose_replies_are_lost")
class CountsLateReplies(_Reusing):
    """After a timeout, a connection skips the replies that are still due, so it waits for lost ones."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, TimeoutError)

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        if connection in self._reused:
            vars(connection)["receive"] = partial(self._received, connection)
            vars(connection)["owed"] = vars(connection).get("owed", 0) + 1
        return connection

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        while vars(connection)["owed"]:
            Connection.receive(connection, deadline)
            vars(connection)["owed"] -= 1
        self._reused.discard(connection)
        return Connection.receive(connection, deadline)


@caught_by("KV-305:it_works_again_after_silence")
class KeepsOnePoisoned(WireStore):
    """If all connections time out at once, one goes back into the pool, and every fourth call fails."""

    _poisoned: Connection | None = None

    def _after_failure(self, number: int, connection: Connection) -> None:
        if self._poisoned is None and len(self._busy) == self._settings.parallelism:
            self._poisoned = connection
        super()._after_failure(number, connection)

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        if self._poisoned is not None and number % 4 == 0:
            connection.close()
        return connection


@caught_by(
    "KV-305:it_works_again_after_a_refusal",
    "KV-305:it_works_again_after_the_server_was_restarted",
    "KV-305:it_works_again_after_the_server_was_paused",
)
class ConnectsOnce(WireStore):
    """The store keeps its connections for life, and makes no new ones when they are lost."""

    _left: int | None = None

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        if self._left is None:
            self._left = self._settings.parallelism
        if not self._left:
            raise ConnectionAbortedError("all connections are used up")
        self._left -= 1
        return super()._connected(number, deadline)


@caught_by("KV-305:it_works_again_after_the_server_was_restarted", says="does not work again")
class RefusesUntilOpenedAgain(WireStore):
    """If the server ends a connection, sets are refused until the key space is opened once more."""

    _open: set[KeySpace] = own(set)

    def _remember(self, space: KeySpace) -> bool:
        self._open.add(space)
        return super()._remember(space)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        if space not in self._open:
            return [False] * len(hashes)
        return super()._store(space, hashes, contents)

    def _is_fresh(self, connection: Connection) -> bool:
        if super()._is_fresh(connection):
            return True
        self._open.clear()
        return False


@caught_by("KV-305:what_did_not_open_opens_when_the_server_is_there")
class NeverWakesUp(WireStore):
    """If the store is opened without its server, it treats the server as away forever."""

    _asleep = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except StorageUnavailable:
            store = cls(WireSettings.parse("wire", config))
            store._asleep = True
            return store

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        if self._asleep:
            raise ConnectionAbortedError("the server was away")
        return super()._connected(number, deadline)


@caught_by("KV-305:a_key_space_that_was_opened_in_vain_works_later")
class RemembersAFailedOpen(WireStore):
    """If a key space can't be opened the first time, it is refused forever with the same error."""

    _failed: dict[str, HiCacheError] = own(dict)

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._failed:
            raise self._failed[space.id]
        try:
            return super()._remember(space)
        except HiCacheError as error:
            self._failed[space.id] = error
            raise


# --- sets that are late --------------------------------------------------------------------------


@caught_by(
    "KV-304:sets_at_once_to_a_silent_server_end_in_time", seen_in="an author's PostgreSQL store"
)
class SetsInTurn(WireStore):
    """Sets wait for each other at a lock, and the wait has no limit."""

    _turn: threading.Lock = own(threading.Lock)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        with self._turn:
            return super()._store(space, hashes, contents)


@caught_by("KV-304:sets_at_once_to_a_silent_server_end_in_time")
class DeletesInTurn(WireStore):
    """Deletes wait for each other at a lock, and the wait has no limit."""

    _turn: threading.Lock = own(threading.Lock)

    def _remove(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._turn:
            return super()._remove(space, hashes)


@caught_by(
    "KV-007:a_set_that_timed_out_brings_no_deleted_page_back",
    says="deleted after its set had timed out",
    seen_in="an author's PostgreSQL store",
)
class SetsItLater(WireStore):
    """A set that timed out is queued, and the next set stores its pages too."""

    _late: list[tuple[KeySpace, Sequence[str], Sequence[bytes]]] = own(list)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            verdicts = super()._store(space, hashes, contents)
        except StorageTimeout:
            self._late.append((space, hashes, contents))
            raise
        while self._late:
            super()._store(*self._late.pop())
        return verdicts


@caught_by("KV-007:a_set_that_timed_out_brings_no_deleted_page_back")
class SetsItInTheBackground(WireStore):
    """A thread sets pages again whose set has timed out, a moment later."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except StorageTimeout:
            again = threading.Timer(_AGAIN_AFTER_S, self._store_again, (space, hashes, contents))
            again.daemon = True
            again.start()
            raise

    def _store_again(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> None:
        with suppress(HiCacheError):
            super()._store(space, hashes, contents)
