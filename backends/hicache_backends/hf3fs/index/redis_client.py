"""The client of the Redis index: redis-py, with one deadline for all steps of a call.

A time limit of redis-py applies to a single read or a single address, and a name lookup has none.
Here every step of a call, in the thread that makes the call, gets the time that is left until the
deadline.
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

from hicache_storage.backend_support.deadline_socket import DeadlineSocket, connect
from hicache_storage.backend_support.redis_url import check_redis_url
from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.errors import ConfigError, HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.backend_support.deadline import Deadline

_call = threading.local()


class RedisClient:
    """A client that sends commands to one server. Thread-safe; belongs to the process that made it."""

    def __init__(self, url: str) -> None:
        self._pool = _pool(url)
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
        """Lend the redis-py client to a step that ends by the deadline.

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
            # An error of the server may repeat a command with its password; an error of redis-py
            # does not.
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
                "hf3fs: the Redis server of the index gave an unexpected answer"
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
        """Run a Lua script. Return its result, parsed by `parse`.

        Send the script first if the server does not have it.
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


class _Pool(redis.ConnectionPool):
    """Connections that keep the deadline of the call whose thread uses them."""

    def get_connection(self, *arguments: Any, **options: Any) -> Any:
        untyped: Any = super()
        connection = untyped.get_connection(*arguments, **options)
        connection._sock.deadline = _deadline()  # noqa: SLF001 - the socket of `_WithDeadline`
        return connection


class _WithDeadline:
    """A mixin that makes the socket of redis-py's connection classes keep the call's deadline."""

    def _connect(self) -> Any:
        untyped: Any = super()
        return DeadlineSocket(untyped._connect(), _deadline())  # noqa: SLF001 - a method of redis-py


class _Tcp(Connection):
    """A connection over TCP. The name lookup and all addresses share the time that is left."""

    def _connect(self) -> Any:
        return connect(RESOLVER.addresses(self.host, int(self.port), _deadline()), _deadline())


class _Unix(UnixDomainSocketConnection):
    def _connect(self) -> Any:
        return connect([(socket.AF_UNIX, (self.path,))], _deadline())


class _TcpConnection(_WithDeadline, _Tcp):
    pass


class _TlsConnection(_WithDeadline, SSLConnection, _Tcp):
    pass


class _UnixConnection(_WithDeadline, _Unix):
    pass


def _deadline() -> Deadline:
    """Return the deadline of this thread's call."""
    deadline: Deadline = _call.deadline
    return deadline


def _pool(url: str) -> redis.ConnectionPool:
    try:
        untyped: Any = redis_connection
        options: dict[str, Any] = untyped.parse_url(url)
        options.update(
            socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
        )
        kind = options.pop("connection_class", Connection)
        if kind is SSLConnection and str(options.get("ssl_cert_reqs", "")).lower() != "none":
            # Without this option, releases before 6 accept a certificate of any host.
            options["ssl_check_hostname"] = True
        ours: Any = {
            SSLConnection: _TlsConnection,
            UnixDomainSocketConnection: _UnixConnection,
        }.get(kind, _TcpConnection)
        pool = _Pool(connection_class=ours, **options)
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
