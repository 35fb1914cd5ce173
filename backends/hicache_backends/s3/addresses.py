"""The addresses of a host name.

A lookup runs on its own thread. Meanwhile calls use the addresses that are already known.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import StorageUnavailable

_KEPT_S = 30.0
_RETRY_S = 2.0
"""The time until the next lookup, after a failed one or if every address has failed."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a socket's peer."""

    family: int
    sockaddr: tuple[Any, ...]


class Addresses:
    """The addresses of one host, used in turn to spread connections. Thread-safe.

    While a lookup is running, expired addresses stay in use, so if a name server hangs, only calls
    that have no address at all wait. At most one lookup runs at a time.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[Address] = []
        self._expires_s = 0.0
        self._turn = 0
        self._lookup = SingleFlight("hicache-s3-lookup", self._resolve)
        literal = _literal(host)
        self._is_literal = literal is not None
        if literal is not None:
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            self._known = [Address(family, (str(literal), port))]
            self._expires_s = float("inf")

    def wait_until_known(self, limit_s: float) -> bool:
        """Return True once an address is known. Return False after `limit_s`.

        Raises:
            StorageUnavailable: The name has no address.
        """
        if self._known:
            return True
        lookup = self._lookup.wait(limit_s)
        if lookup is None:
            return False
        if lookup.exception() is not None:
            raise StorageUnavailable(
                f"s3: the host {self._host} is not known: check endpoint_url and region"
                f" ({_reason(lookup.exception())})",
                advice="",
            ) from None
        return bool(self._known)  # an earlier lookup may have ended just now

    def next(self) -> Address:
        """Return the address for another connection.

        Call it only after `wait_until_known` has returned True.
        """
        if time.monotonic() > self._expires_s:
            with suppress(StorageUnavailable):  # an old address is known
                self._lookup.begin()
        known = self._known
        self._turn += 1
        return known[self._turn % len(known)]

    def report_failure(self, address: Address) -> None:
        """Prefer other addresses, if there are any. Otherwise look the name up again soon."""
        if self._is_literal:
            return
        others = [one for one in self._known if one != address]
        if others:
            self._known = others
        else:
            self._expires_s = min(self._expires_s, time.monotonic() + _RETRY_S)

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        finally:
            self._expires_s = time.monotonic() + _RETRY_S
        if not found:
            raise OSError("the name has no address")
        addresses = (Address(family, sockaddr) for family, _, _, _, sockaddr in found)
        self._known = list(dict.fromkeys(addresses))
        self._expires_s = time.monotonic() + _KEPT_S


def is_loopback(host: str) -> bool:
    """Return True if a connection to `host` stays on this machine."""
    literal = _literal(host)
    return host == "localhost" or (literal is not None and literal.is_loopback)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _reason(error: BaseException | None) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return text or type(error).__name__
