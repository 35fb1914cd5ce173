"""Where a host name leads: resolved beside the caller, who does not wait longer than it may."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_KEPT_S = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """What a socket connects to."""

    family: int
    sockaddr: tuple[Any, ...]


class Addresses:
    """The addresses of one host, taken in turns, so that connections spread. Thread-safe."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._known: list[Address] = []
        self._stale_s = 0.0
        self._turn = 0
        literal = _literal(host)
        if literal is not None:
            family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            self._known = [Address(family, (str(literal), port))]
            self._stale_s = float("inf")

    def next(self, deadline_s: float) -> Address:
        """The address for one more connection.

        Raises:
            StorageUnavailable, StorageTimeout: The name does not lead anywhere.
        """
        if time.monotonic() > self._stale_s or not self._known:
            self._resolve(deadline_s)
        known = self._known
        self._turn += 1
        return known[self._turn % len(known)]

    def failed(self, address: Address) -> None:
        """Nobody answers there: try others first, as long as there are any."""
        known = [one for one in self._known if one != address]
        if known:
            self._known = known

    def _resolve(self, deadline_s: float) -> None:
        try:
            found = done_in_time(self._looked_up, deadline_s)
        except TimeoutError as error:
            if not self._known:
                raise StorageTimeout(
                    f"s3: the host {self._host} was not resolved in time"
                ) from error
        except (OSError, UnicodeError) as error:
            if not self._known:
                raise StorageUnavailable(
                    f"s3: the host {self._host} is not known: check endpoint_url and region"
                ) from error
        else:
            self._known = found
        self._stale_s = time.monotonic() + _KEPT_S

    def _looked_up(self) -> list[Address]:
        found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in found))


def is_loopback(host: str) -> bool:
    """Whether a connection to `host` stays on this machine."""
    literal = _literal(host)
    return host == "localhost" or (literal is not None and literal.is_loopback)


def done_in_time(call: Callable[[], T], deadline_s: float) -> T:
    """What `call` returns or raises, from a thread that is left behind if it takes too long.

    Raises:
        TimeoutError: It has not returned by `deadline_s`.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised where the answer is waited for
            answers.put((None, error))

    threading.Thread(target=ask, name="hicache-s3-lookup", daemon=True).start()
    try:
        answer, error = answers.get(timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("not done by the deadline") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]  # None only beside an error


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
