"""Where a host name leads: resolved beside the callers, who use what was known until that is done."""

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
"""After which a look-up is made again where one failed, or where every address has failed."""


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket connects to."""

    family: int
    sockaddr: tuple[Any, ...]


class Addresses:
    """The addresses of one host, taken in turns, so that connections spread. Thread-safe.

    Addresses that are out of date are served while a look-up is in flight: a name server that hangs
    delays only who knows no address at all. At most one look-up is in flight.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[Address] = []
        self._stale_s = 0.0
        self._turn = 0
        self._look_up = SingleFlight("hicache-s3-lookup", self._looked_up)
        literal = _literal(host)
        self._is_literal = literal is not None
        if literal is not None:
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            self._known = [Address(family, (str(literal), port))]
            self._stale_s = float("inf")

    def await_known(self, limit_s: float) -> bool:
        """Return True once an address is known; False where the look-up still runs after `limit_s`.

        Raises:
            StorageUnavailable: The name does not lead anywhere.
        """
        if self._known:
            return True
        look_up = self._look_up.wait(limit_s)
        if look_up is None:
            return False
        if look_up.exception() is not None:
            raise StorageUnavailable(
                f"s3: the host {self._host} is not known: check endpoint_url and region"
                f" ({_reason(look_up.exception())})"
            ) from None
        return True

    def next(self) -> Address:
        """Return the address for one more connection. Only after `await_known` was True."""
        if time.monotonic() > self._stale_s:
            with suppress(StorageUnavailable):  # there is an old address
                self._look_up.begin()
        known = self._known
        self._turn += 1
        return known[self._turn % len(known)]

    def failed(self, address: Address) -> None:
        """Take other addresses first, as long as there are any; then ask for new ones soon."""
        if self._is_literal:
            return
        others = [one for one in self._known if one != address]
        if others:
            self._known = others
        else:
            self._stale_s = min(self._stale_s, time.monotonic() + _RETRY_S)

    def _looked_up(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        finally:
            self._stale_s = time.monotonic() + _RETRY_S
        if not found:
            raise OSError("the name has no address")
        addresses = (Address(family, sockaddr) for family, _, _, _, sockaddr in found)
        self._known = list(dict.fromkeys(addresses))
        self._stale_s = time.monotonic() + _KEPT_S


def is_loopback(host: str) -> bool:
    """Whether a connection to `host` stays on this machine."""
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
