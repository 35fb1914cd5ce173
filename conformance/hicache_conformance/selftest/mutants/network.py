"""Wrong stores: what they do when the network or the server fails, and how often they use it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import (
    NEVER,
    Connection,
    Deadline,
    Message,
    Operation,
)
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import PageInfo, StorageStats


class _ForTheBeginning(Deadline):
    """Is over only the first time that it is asked."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._asked = False

    def left_s(self) -> float | None:
        asked, self._asked = self._asked, True
        return NEVER.left_s() if asked else super().left_s()


class _Wrapped(WireStore):
    """A wire store whose connections a subclass can get hold of when they are leased."""

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
    """Its timeout is for the beginning of a reply; the rest of it is waited for."""

    def _received(self, connection: Connection, deadline: Deadline) -> Message:
        del deadline
        return super()._received(connection, _ForTheBeginning(self._settings.timeout_s))


@caught_by("KV-304:a_server_that_does_not_accept_is_an_error_in_time")
class ConnectsWithoutATimeout(WireStore):
    """Connecting has no timeout of its own."""

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        del deadline
        return super()._connected(number, NEVER)


@caught_by("KV-304:calls_that_wait_for_a_connection_are_in_time")
class QueuesWithoutATimeout(_Wrapped):
    """The time that a call waits for a connection is not counted."""

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
    """Its timeout is for the reply: what the server does not read is sent for ever."""

    def _lease(self, number: int, deadline: Deadline) -> Connection:
        connection = super()._lease(number, deadline)
        vars(connection)["send"] = partial(self._sent, connection)
        return connection

    def _sent(self, connection: Connection, message: Message, deadline: Deadline) -> None:
        del deadline
        Connection.send(connection, message)


@caught_by("KV-304:no_other_call_hangs_or_raises_what_is_foreign")
class AsksForItsStats(WireStore):
    """Its stats are the server's, and asked for: the metrics of an engine wait, and fail, with it."""

    def stats(self) -> StorageStats:
        self._exchange(Operation.PING)
        return super().stats()


@caught_by(
    "KV-304:a_server_that_refuses_is_unavailable", "KV-304:a_server_that_stops_is_unavailable"
)
class MissesWhenUnreachable(WireStore):
    """A server that can't be reached is a store without pages."""

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
    """Raise where nothing was sent: such a failure is told as it should be."""
    if isinstance(error.__cause__, ConnectionRefusedError):
        raise error


@caught_by("KV-304:a_set_whose_connection_breaks_tells_the_truth")
class SetsWithoutLooking(_Wrapped):
    """A set that was sent is True, whatever becomes of its reply."""

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
    """A reply that breaks off is filled up with what the page held before: zeros, or another page."""

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        try:
            return super()._contents(space, hashes)
        except StorageUnavailable as error:
            _must_have_been_connected(error)
            return [bytes(space.stored_nbytes)] * len(hashes)


@caught_by("KV-304:close_does_not_wait_for_a_silent_server")
class SaysGoodbye(WireStore):
    """Close tells the server, and waits for its answer."""

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
    """Each batch asks again for all batches before it."""

    _batches = 0

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        for _ in range(self._batches):
            self._exchange(Operation.PING)
        self._batches += len(hashes) > 1
        return super()._present(space, hashes)


@caught_by("KV-304:a_listing_that_never_came_is_no_empty_one")
class ListsNothingWhenLate(WireStore):
    """A listing that the server does not answer is an empty one."""

    def _names(self, space: KeySpace) -> list[PageInfo]:
        try:
            return super()._names(space)
        except HiCacheError:
            return []


@caught_by("KV-304:a_silent_server_is_a_timeout")
class RefusesWhenLate(WireStore):
    """A set that the server does not answer is False, and may show later."""

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        try:
            return super()._store(space, hashes, contents)
        except HiCacheError:
            return [False] * len(hashes)
