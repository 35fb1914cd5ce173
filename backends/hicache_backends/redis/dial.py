"""Connected sockets, encrypted or not, by a deadline."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING, Any

from hicache_storage.backend_support.resolver import RESOLVER
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from hicache_backends.redis.address import Address
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.backend_support.resolver import SocketAddress

_LEAST_S = 0.001
"""A timeout of 0 would mean not to wait at all."""
_TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


def dial(address: Address, context: ssl.SSLContext | None, deadline: Deadline) -> socket.socket:
    """Return a socket that is connected to `address`, encrypted if there is a `context`.

    Raises:
        StorageTimeout: The name server, the server or its TLS did not answer in time.
        OSError: The server cannot be reached, or is not the one that its certificate must name.
    """
    plain = _plain(address, deadline)
    if context is None:
        return plain
    try:
        return _encrypted(plain, context, address, deadline)
    except BaseException:
        plain.close()
        raise


def _plain(address: Address, deadline: Deadline) -> socket.socket:
    """Try every address that the name has. None may take the time that the others need."""
    if address.path is not None:
        candidates: list[SocketAddress] = [(socket.AF_UNIX, (address.path,))]
    else:
        candidates = RESOLVER.addresses(address.host, address.port, deadline)
    failure = OSError("there is no address")
    for index, candidate in enumerate(candidates):
        share_s = deadline.remaining_s() / (len(candidates) - index)
        try:
            return _connected(*candidate, share_s)
        except OSError as error:
            failure = error
    if isinstance(failure, TimeoutError):
        raise StorageTimeout(
            f"connecting to {address} did not end within {deadline.timeout_s:g} s"
        ) from None
    raise ConnectionError(f"cannot connect to {address}: {failure.strerror or failure}") from None


def _connected(family: int, where: tuple[Any, ...], timeout_s: float) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            for option in _TCP_OPTIONS:
                made.setsockopt(*option)
        made.settimeout(max(_LEAST_S, timeout_s))
        made.connect(where[0] if family == socket.AF_UNIX else where)
    except BaseException:
        made.close()
        raise
    return made


def _encrypted(
    plain: socket.socket, context: ssl.SSLContext, address: Address, deadline: Deadline
) -> ssl.SSLSocket:
    plain.settimeout(max(_LEAST_S, deadline.remaining_s()))
    try:
        return context.wrap_socket(plain, server_hostname=address.host)
    except ssl.SSLCertVerificationError as error:
        raise ConnectionError(
            f"the certificate of {address} is refused: {error.verify_message}"
        ) from None
    except TimeoutError:
        raise StorageTimeout(
            f"the TLS handshake with {address} did not end within {deadline.timeout_s:g} s. Does the"
            " server speak TLS at this port? Without it the scheme is redis://"
        ) from None
    except ssl.SSLError as error:
        hint = ""
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
            hint = ". The server does not speak TLS at this port: without it the scheme is redis://"
        raise ConnectionError(
            f"the TLS handshake with {address} failed: {error.reason or error}{hint}"
        ) from None
    except OSError as error:
        raise ConnectionError(
            f"the TLS handshake with {address} failed: {error.strerror or error}. Does the server"
            " speak TLS at this port? Without it the scheme is redis://"
        ) from None
    except ValueError:  # a name that no certificate can have
        raise ConnectionError(f"{address} has no name that a certificate could have") from None
