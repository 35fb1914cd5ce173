"""A connection to one server: redis-py's greeting and commands over a `DeadlineSocket`.

redis-py authenticates, selects the database, packs commands and reads replies that carry no page.
We override its private method `Connection._connect`, so that the connection uses our socket.
"""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Any

import redis.connection
from redis import exceptions

from hicache_backends.redis.replies import MALFORMED, ErrorReply, WrongReply
from hicache_storage.backend_support.deadline_socket import DeadlineSocket, connect
from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.backend_support.tls_failures import tls_failure
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.redis.access import Access, Address
    from hicache_backends.redis.replies import Command, Reply
    from hicache_storage.backend_support.connection_pool import ConnectionPool
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.resolver import SocketAddress

_MAX_COMMANDS = 1024
"""How many commands are sent before replies are read. They and their replies fit in kernel buffers."""
_TLS_ALERT = "\\x15"
"""The first byte with which a TLS server answers RESP, as hiredis shows it."""
_CLOSED_BY_SERVER = "closed by server"
"""Part of redis-py's message for a connection that the server has closed."""
_CONNECT = "_connect"

if not hasattr(redis.connection.Connection, _CONNECT):
    raise ImportError(
        f"redis-py {redis.__version__} has no Connection._connect: install another release of redis",
        name="redis",
    )


class _WithSocket:
    """A mixin that gives redis-py's connection classes a connected socket."""

    given_socket: DeadlineSocket

    def _connect(self) -> Any:
        return self.given_socket


class TcpConnection(_WithSocket, redis.connection.Connection):
    """A redis-py connection over TCP, encrypted or not."""


class UnixConnection(_WithSocket, redis.connection.UnixDomainSocketConnection):
    """A redis-py connection over a unix socket."""


class Connection:
    """A connection of a pool. One thread at a time may use it; any thread may call `shut_down`."""

    def __init__(
        self, pool: ConnectionPool[Connection], address: Address, access: Access, deadline: Deadline
    ) -> None:
        """Connect. The first `prepare` greets the server."""
        self.pool = pool
        self._address = address
        self._access = access
        options = {**access.options, "socket_timeout": None}
        options["protocol"] = (
            2  # RESP3 has another reply for a miss, and lets servers push messages
        )
        if address.path is not None:
            kind: Any = UnixConnection
            options["path"] = address.path
        else:
            kind = TcpConnection
            options |= {"host": address.host, "port": address.port}
        self._redis_connection: Any = kind(**options)
        self.socket = DeadlineSocket(dial(address, access.context, deadline), deadline)
        self._redis_connection.given_socket = self.socket
        self._is_greeted = False
        self.identity: tuple[bytes, bytes] | None = None
        """The server's id for this connection, and the client's address as the server sees it."""

    def prepare(self, deadline: Deadline) -> bool:
        """Set the deadline. Greet the server once, and later return False if anything has arrived."""
        self.socket.deadline = deadline
        if not self._is_greeted:
            self._greet()
            self._is_greeted = True
            return True
        try:
            return not self._redis_connection.can_read(0)
        except (OSError, exceptions.RedisError):
            return False

    def execute(self, commands: Sequence[Command]) -> list[Reply]:
        """Send commands that carry no page, many at a time. Return their replies."""
        replies: list[Reply] = []
        for start in range(0, len(commands), _MAX_COMMANDS):
            part = commands[start : start + _MAX_COMMANDS]
            packed = b"".join(self._redis_connection.pack_commands(part))
            self._redis_connection.send_packed_command([packed], check_health=False)
            replies.extend(self._read_reply() for _ in part)
        return replies

    def shut_down(self) -> None:
        """End the connection. A thread that waits in it wakes up."""
        self.socket.shut_down()

    def close(self) -> None:
        """Free the connection. redis-py sends nothing in a forked child."""
        self._redis_connection.disconnect()
        self.socket.close()

    # --- parts -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        """Authenticate, and read the connection's identity. If we are read-only, tell the server."""
        try:
            self._redis_connection.connect()
        except (exceptions.InvalidResponse, exceptions.ConnectionError) as error:
            if self._access.context is None and _may_be_tls(error):
                raise StorageUnavailable(
                    f"{self._address} does not answer like a Redis server: {error} If it uses"
                    " TLS, the scheme must be rediss://",
                    advice="",
                ) from None
            raise
        except MALFORMED as error:
            raise WrongReply("a reply has an unexpected form") from error
        self.identity = self._read_identity()

    def _read_reply(self) -> Reply:
        try:
            return self._redis_connection.read_response()
        except exceptions.ResponseError as error:
            reply = ErrorReply.from_exception(error)
            if reply.is_stale:
                self.pool.retire()
            return reply
        except MALFORMED as error:
            raise WrongReply("a reply has an unexpected form") from error

    def _read_identity(self) -> tuple[bytes, bytes] | None:
        commands: list[Command] = [("CLIENT", "INFO")]
        if self._access.is_read_only:  # Redis before 7.2 refuses it
            commands.append(("CLIENT", "NO-TOUCH", "ON"))
        reply, *_ = self.execute(commands)
        if not isinstance(reply, bytes):
            return None
        parts = (part.partition(b"=") for part in reply.split())
        fields = {name: value for name, _, value in parts}
        return (fields[b"id"], fields[b"addr"]) if {b"id", b"addr"} <= fields.keys() else None


def _may_be_tls(error: Exception) -> bool:
    """Return True if a greeting failed the way it does with a TLS server. Most TLS servers hang up."""
    ended = isinstance(error.__context__, ConnectionResetError) or _CLOSED_BY_SERVER in str(error)
    return ended or _TLS_ALERT in str(error)


# --- connecting ----------------------------------------------------------------------------------


def dial(address: Address, context: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    """Return a socket that is connected to `address`, encrypted if there is a `context`.

    Raises:
        StorageTimeout: The name server, the server or its TLS did not answer in time.
        OSError: The server cannot be reached, or its certificate is refused.
    """
    plain = _connect(address, deadline)
    if context is None:
        return plain
    try:
        return _encrypt(plain, context, address, deadline)
    except BaseException:
        plain.close()
        raise


def _connect(address: Address, deadline: Deadline) -> socket.socket:
    if address.path is not None:
        candidates: list[SocketAddress] = [(socket.AF_UNIX, (address.path,))]
    else:
        candidates = RESOLVER.addresses(address.host, address.port, deadline)
    try:
        return connect(candidates, deadline)
    except TimeoutError:
        raise StorageTimeout(
            f"connecting to {address} did not end within {deadline.timeout_s:g} s"
        ) from None
    except OSError as error:
        raise ConnectionError(f"cannot connect to {address}: {error.strerror or error}") from None


def _encrypt(
    plain: socket.socket, context: ssl.SSLContext, address: Address, deadline: Deadline
) -> ssl.SSLSocket:
    try:
        return context.wrap_socket(plain, server_hostname=address.host)
    except TimeoutError:
        raise StorageTimeout(
            f"the TLS handshake with {address} did not end within {deadline.timeout_s:g} s. Does the"
            " server use TLS on this port? If not, the scheme must be redis://"
        ) from None
    except ssl.SSLError as error:
        raise tls_failure(
            address, error, authority_field="tls_ca_file", plain_scheme="redis://"
        ) from None
    except OSError as error:
        raise StorageUnavailable(
            f"the TLS handshake with {address} failed: {error.strerror or error}. Does the server"
            " use TLS on this port? If not, the scheme must be redis://",
            advice="",
        ) from None
    except ValueError:
        raise ConnectionError(
            f"the host of {address} is not a name that a certificate can have"
        ) from None
