"""A connection to one server, and the pipelines that go over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from redis import exceptions

from hicache_backends.redis._replies import ErrorReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis._replies import Command, Reply
    from hicache_backends.redis._wire import Deadline, Wire

_MOST_COMMANDS = 1024
"""Before replies are read: so many requests and replies fit into the kernel's buffers."""


class Link:
    """One redis-py connection. Used by one thread at a time; any thread may `hang_up`.

    Whoever meets an exception drops the link: replies may still be on their way.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._is_connected = False
        self.identity: tuple[bytes, bytes] | None = None
        """How the server tells this connection from others: an id, and the address it comes from."""

    @property
    def wire(self) -> Wire:
        return cast("Wire", self._connection.wire)

    def ready(self, deadline: Deadline) -> bool:
        """See to it that it is connected, as it was left, and keeps `deadline`; whether it is new."""
        self._connection.deadline = deadline
        if self._is_connected and self._is_quiet(deadline):
            return False
        self.drop()
        self._connection.connect()
        self._is_connected = True
        self.identity = self._identity()
        return True

    def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that carry no page, many at once; their replies."""
        replies: list[Reply] = []
        for start in range(0, len(commands), _MOST_COMMANDS):
            part = commands[start : start + _MOST_COMMANDS]
            packed = b"".join(self._connection.pack_commands(part))
            self._connection.send_packed_command([packed], check_health=False)
            replies.extend(self._read() for _ in part)
        return replies

    def hang_up(self) -> None:
        """End it for good; a thread that waits in it is woken."""
        self._connection.hang_up()

    def drop(self) -> None:
        self._is_connected = False
        self._connection.disconnect()

    def _read(self) -> Reply:
        try:
            return self._connection.read_response()
        except exceptions.ResponseError as error:
            return ErrorReply.of(error)

    def _is_quiet(self, deadline: Deadline) -> bool:
        """Whether nothing has come meanwhile: neither the end, nor replies that nobody waits for."""
        self.wire.deadline = deadline
        try:
            return not self._connection.can_read(0)
        except (OSError, exceptions.RedisError):
            return False

    def _identity(self) -> tuple[bytes, bytes] | None:
        (told,) = self.exchange([("CLIENT", "INFO")])
        if not isinstance(told, bytes):
            return None
        parts = (part.partition(b"=") for part in told.split())
        fields = {name: value for name, _, value in parts}
        return (fields[b"id"], fields[b"addr"]) if {b"id", b"addr"} <= fields.keys() else None
