"""Wrong stores: what they do when the network or the server is back."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import (
    Connection,
    Deadline,
    Message,
    Operation,
)
from hicache_conformance.selftest.references.wire_settings import WireSettings
from hicache_storage.errors import HiCacheError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace


class _Reusing(WireStore):
    """Goes on using connections that have failed; which ones, a subclass says."""

    _asked = own(threading.local)
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

    def _reuses(self, error: BaseException | None) -> bool:
        raise NotImplementedError


@caught_by(
    "KV-305:it_works_again_after_replies_were_cut_short",
    seen_in="redis backend of this project, mended",
)
class KeepsBrokenConnections(_Reusing):
    """A connection that was reset goes back into the pool, and fails for ever."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, ConnectionError)


@caught_by("KV-305:a_late_page_is_not_taken_for_a_later_one")
class TakesLateReplies(_Reusing):
    """A connection whose get timed out is used again, and its late reply is taken for the next one."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, TimeoutError) and self._asked.operation == Operation.GET

    def _check(self, request: Message, reply: Message) -> None:
        if reply.operation != Operation.GET:
            super()._check(request, reply)


@caught_by("KV-305:a_late_verdict_is_not_taken_for_a_later_one")
class TakesLateVerdicts(_Reusing):
    """A connection whose exists timed out is used again, and its late verdict taken for the next one."""

    def _reuses(self, error: BaseException | None) -> bool:
        return isinstance(error, TimeoutError) and self._asked.operation == Operation.EXISTS

    def _check(self, request: Message, reply: Message) -> None:
        if reply.operation != Operation.EXISTS:
            super()._check(request, reply)


@caught_by("KV-305:it_works_again_after_silence_whose_replies_are_lost")
class CountsLateReplies(_Reusing):
    """Of a connection that timed out, the replies that are owed are skipped: lost ones never come."""

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
    """Of connections that time out at once, one goes back into the pool: every fourth call fails."""

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
    """It has its connections for life: when they are lost, there are no new ones."""

    _left: int | None = None

    def _connected(self, number: int, deadline: Deadline) -> Connection:
        if self._left is None:
            self._left = self._settings.parallelism
        if not self._left:
            raise ConnectionAbortedError("all connections are used up")
        self._left -= 1
        return super()._connected(number, deadline)


@caught_by("KV-305:what_did_not_open_opens_when_the_server_is_there")
class NeverWakesUp(WireStore):
    """It opens without its server, and then takes it for away for ever."""

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
    """A key space whose first opening failed is refused for ever, with the error of that time."""

    _failed: dict[str, HiCacheError] = own(dict)

    def _remember(self, space: KeySpace) -> bool:
        if space.id in self._failed:
            raise self._failed[space.id]
        try:
            return super()._remember(space)
        except HiCacheError as error:
            self._failed[space.id] = error
            raise
