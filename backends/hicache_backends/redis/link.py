"""A connection to one server, and the pipelines that go over it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis import exceptions

from hicache_backends.redis.connection import TcpConnection, UnixConnection, Wire
from hicache_backends.redis.dial import dial
from hicache_backends.redis.replies import MALFORMED, ErrorReply, WrongReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.access import Access
    from hicache_backends.redis.address import Address
    from hicache_backends.redis.replies import Command, Reply
    from hicache_storage.backend_support.deadline import Deadline

_MOST_COMMANDS = 1024
"""Before replies are read: so many requests and replies fit into the kernel's buffers."""
_TLS_ALERT = "\\x15"
"""The first byte of what a server of TLS may answer to RESP, as hiredis shows it."""
_ENDED = "closed by server"
"""In redis-py's message."""


class Link:
    """One connection. Used by one thread at a time; any thread may `hang_up`.

    Whoever meets an exception drops the link: replies may still be on their way.
    """

    def __init__(self, address: Address, access: Access) -> None:
        self._address = address
        self._access = access
        options = {**access.options, "socket_timeout": None}
        options["protocol"] = 2  # in RESP3 a miss has another length, and servers may push
        if address.path is not None:
            kind: Any = UnixConnection
            options["path"] = address.path
        else:
            kind = TcpConnection
            options |= {"host": address.host, "port": address.port}
        self._connection: Any = kind(**options)
        self._wire: Wire | None = None
        self._is_ended = False
        self.is_stale = False
        """The server said that it is not the one to ask: give this connection back to be dropped."""
        self.identity: tuple[bytes, bytes] | None = None
        """How the server tells this connection from others: an id, and the address it comes from."""

    @property
    def wire(self) -> Wire:
        assert self._wire is not None
        return self._wire

    def ready(self, deadline: Deadline) -> bool:
        """See to it that it is connected, as it was left, and keeps `deadline`; whether it is new."""
        if self._wire is not None and self._is_quiet(self._wire, deadline):
            return False
        self.drop()
        made = Wire(dial(self._address, self._access.context, deadline), deadline)
        self._wire = self._connection.wire = made
        if self._is_ended:
            raise ConnectionAbortedError("it was ended while it connected")
        self._greet()
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
        """End it for good, whatever it is doing; a thread that waits in it is woken."""
        self._is_ended = True
        if self._wire is not None:
            self._wire.hang_up()

    def drop(self) -> None:
        """Close it. It may be made `ready` again."""
        self._connection.disconnect()
        if self._wire is not None:
            self._wire.close()
        self._wire = self._connection.wire = None
        self.is_stale = False

    # --- parts -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Say who we are, and ask who the server takes us for."""
        try:
            self._connection.connect()
        except (exceptions.InvalidResponse, exceptions.ConnectionError) as error:
            if self._access.context is None and _may_be_tls(error):
                raise ConnectionError(
                    f"{self._address} does not answer as a Redis does: {error} If it speaks TLS, the"
                    " scheme must be rediss://"
                ) from None
            raise
        except MALFORMED as error:
            raise WrongReply("a reply has another form") from error
        self.identity = self._identity()

    def _read(self) -> Reply:
        try:
            return self._connection.read_response()
        except exceptions.ResponseError as error:
            reply = ErrorReply.of(error)
            self.is_stale |= reply.is_stale
            return reply
        except MALFORMED as error:
            raise WrongReply("a reply has another form") from error

    def _is_quiet(self, wire: Wire, deadline: Deadline) -> bool:
        """Whether nothing has come meanwhile: neither the end, nor replies that nobody waits for."""
        wire.deadline = deadline
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


def _may_be_tls(error: Exception) -> bool:
    """Whether a greeting failed as it does where a server speaks TLS: most end the connection."""
    ended = isinstance(error.__context__, ConnectionResetError) or _ENDED in str(error)
    return ended or _TLS_ALERT in str(error)
