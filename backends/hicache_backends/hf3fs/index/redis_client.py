"""The client of the Redis index: redis-py, with one deadline for all steps of a call.

A time limit of redis-py holds for one read or one address, and a name look-up has none. Here every step
of a call, in the thread that makes the call, gets the time that is left of the call's deadline.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

import redis
from redis import connection as redis_connection
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from hicache_storage.backend_support.redis_url import check_redis_url
from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.errors import ConfigError, HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.backend_support.deadline import Deadline

_call = threading.local()


class RedisClient:
    """Commands to one server. Thread-safe; belongs to the process that made it."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._pool = _pool(url, timeout_s)
        client_class: Any = redis.Redis
        self._client: Any = client_class(connection_pool=self._pool)
        self._scripts: dict[str, Any] = {}

    @property
    def place(self) -> str:
        """The server and its database, without user and password."""
        options: dict[str, Any] = self._pool.connection_kwargs
        server = options.get("path") or f"{options.get('host')}:{options.get('port', 6379)}"
        return f"{server}/{options.get('db') or 0}"

    @contextlib.contextmanager
    def call(self, deadline: Deadline) -> Generator[Any, None, None]:
        """Lend the client of redis-py to a step that ends by the deadline.

        Raises:
            StorageTimeout, StorageUnavailable: For everything that redis-py raises.
        """
        outer, _call.deadline = getattr(_call, "deadline", None), deadline
        try:
            deadline.check("hf3fs: the request to the Redis index")
            yield self._client
        except redis.TimeoutError:
            raise StorageTimeout(
                "hf3fs: the Redis server of the index did not answer within"
                f" {deadline.timeout_s:g} s"
            ) from None
        except redis.AuthenticationError:
            raise StorageUnavailable(
                "hf3fs: index: the Redis server refuses the user or the password"
            ) from None
        except redis.RedisError as error:
            # An error of the server may repeat a command with its password; one of redis-py does not.
            detail = f": {error}" if type(error) is redis.ConnectionError else ""
            raise StorageUnavailable(
                "hf3fs: the Redis server of the index cannot be used"
                f" ({type(error).__name__}{detail})"
            ) from None
        except HiCacheError:
            raise
        except OSError as error:
            raise StorageUnavailable(f"hf3fs: {error.strerror or error}") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise StorageUnavailable(
                "hf3fs: the Redis server of the index gave an answer that no index gives"
                f" ({type(error).__name__})"
            ) from error
        finally:
            _call.deadline = outer

    def run(
        self,
        deadline: Deadline,
        script: str,
        prefix: str,
        *arguments: object,
        parse: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Run a Lua script, and return what `parse` makes of its result.

        A server that does not have the script gets its text.
        """
        with self.call(deadline) as client:
            registered = self._scripts.get(script)
            if registered is None:
                registered = self._scripts[script] = client.register_script(script)
            result = registered(keys=[prefix], args=arguments)
            return result if parse is None else parse(result)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._client.close()
        self._pool.disconnect()


class _TcpConnection(Connection):
    """A connection over TCP. The look-up and all addresses share the time that is left."""

    def _connect(self) -> Any:
        addresses = RESOLVER.addresses(self.host, int(self.port), _deadline())
        refused: OSError = OSError(f"the name {self.host} has no address")
        for tried, (family, address) in enumerate(addresses):
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(_remaining_s() / (len(addresses) - tried))
                connection.connect(address)
                connection.settimeout(_remaining_s())
            except OSError as error:
                connection.close()
                refused = error
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise refused


class _PlainConnection(_TcpConnection):
    def _connect(self) -> Any:
        untyped: Any = super()
        return _BoundedSocket(untyped._connect())  # noqa: SLF001 - the method above


class _TlsConnection(SSLConnection, _TcpConnection):
    def _connect(self) -> Any:
        untyped: Any = super()
        return _BoundedSocket(untyped._connect())  # noqa: SLF001 - the method above


class _UnixConnection(UnixDomainSocketConnection):
    def _connect(self) -> Any:
        self.socket_connect_timeout = _remaining_s()
        untyped: Any = super()
        return _BoundedSocket(untyped._connect())  # noqa: SLF001 - the method above


class _BoundedSocket:
    """A socket. Every step ends by the deadline of the call that uses the socket."""

    def __init__(self, connection: Any) -> None:
        self._socket = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, *arguments: Any) -> Any:
        return self._within(self._socket.recv, *arguments)

    def recv_into(self, *arguments: Any) -> Any:
        return self._within(self._socket.recv_into, *arguments)

    def sendall(self, *arguments: Any) -> Any:
        return self._within(self._socket.sendall, *arguments)

    def _within(self, step: Any, *arguments: Any) -> Any:
        usual_s = self._socket.gettimeout()
        if usual_s == 0:
            return step(*arguments)
        self._socket.settimeout(_remaining_s())
        try:
            return step(*arguments)
        finally:
            self._socket.settimeout(usual_s)


def _deadline() -> Deadline:
    """Return the deadline of the call of this thread."""
    deadline: Deadline = _call.deadline
    return deadline


def _remaining_s() -> float:
    """Return the seconds that the call of this thread has left.

    Raises:
        TimeoutError: No time is left.
    """
    remaining_s = _deadline().remaining_s()
    if not remaining_s:
        raise TimeoutError("the deadline of the call has passed")
    return remaining_s


def _pool(url: str, timeout_s: float) -> redis.ConnectionPool:
    try:
        untyped: Any = redis_connection
        options: dict[str, Any] = untyped.parse_url(url)
        options.update(
            socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
        )
        kind = options.pop("connection_class", Connection)
        if kind is SSLConnection and str(options.get("ssl_cert_reqs", "")).lower() != "none":
            # Releases before 6 accept a certificate of any host without this option.
            options["ssl_check_hostname"] = True
        ours: Any = {
            SSLConnection: _TlsConnection,
            UnixDomainSocketConnection: _UnixConnection,
        }.get(kind, _PlainConnection)
        pool = redis.ConnectionPool(connection_class=ours, **options)
        pool.make_connection()  # no I/O: wrong options raise here
    except (ValueError, TypeError, redis.RedisError):
        raise ConfigError('hf3fs: index: must be "sqlite" or a URL such as redis://host') from None
    try:
        check_redis_url(url)
    except ValueError as error:
        raise ConfigError(f"hf3fs: index: {error}") from None
    if not options.get("host") and not options.get("path"):
        raise ConfigError("hf3fs: index: must name a host, or the path of a unix socket")
    return pool
