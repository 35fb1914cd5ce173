"""Look up host names with a time limit, which the system's own look-ups do not have.

A look-up runs in its own thread, and no caller can end it. Therefore each name has at most one look-up
in flight. While the name server is silent, the resolver returns the name's old addresses.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.backend_support.deadline import Deadline

SocketAddress: TypeAlias = tuple[int, tuple[Any, ...]]
"""An address family, and an address for `socket.connect`."""

_OLD_ADDRESSES_AFTER_S = 1.0
"""The age of a look-up after which calls continue with the old addresses."""
_OLD_ADDRESSES_SHARE = 0.25
"""The share of a call's remaining time to wait for new addresses, if there are old addresses."""
_NO_ANSWER = (socket.EAI_AGAIN, socket.EAI_FAIL)
"""Errors that mean the name server did not answer. Its earlier answers may still be right."""
_MAX_NAMES = 1024


class Resolver:
    """The look-ups of this process. Thread-safe. A forked child starts without look-ups."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. A forked child lacks its parent's threads, and cannot use its locks."""
        self._lock = threading.Lock()
        self._look_ups: dict[str, SingleFlight[list[SocketAddress]]] = {}
        self._known: dict[str, list[SocketAddress]] = {}

    def addresses(self, host: str, port: int, deadline: Deadline) -> list[SocketAddress]:
        """Return the addresses of a host, in the order in which to try them.

        Raises:
            StorageTimeout: The name server did not answer in time.
            OSError: The name does not exist, or cannot be looked up.
        """
        literal = _literal_address(host)
        found = [literal] if literal else self._resolve(host, deadline)
        return [(family, (address[0], port, *address[2:])) for family, address in found]

    def _resolve(self, host: str, deadline: Deadline) -> Sequence[SocketAddress]:
        known = self._known.get(host)
        look_up = self._look_up_of(host)
        limit_s = deadline.remaining_s()
        if known:
            until_old_s = max(0.0, _OLD_ADDRESSES_AFTER_S - look_up.age_s())
            limit_s = min(until_old_s, limit_s * _OLD_ADDRESSES_SHARE)
        try:
            flight = look_up.wait(limit_s)
        except StorageUnavailable:
            if known:
                return known
            raise
        error = None if flight is None else flight.exception()
        if flight is not None and error is None:
            return flight.result()
        if known and (error is None or getattr(error, "errno", None) in _NO_ANSWER):
            return known
        if error is None:
            raise StorageTimeout(
                f"the look-up of host {host!r} did not end within {deadline.timeout_s:g} s"
            )
        reason = getattr(error, "strerror", None) or "it is not a host name"
        raise ConnectionError(f"host {host!r} cannot be looked up: {reason}") from error

    def _look_up_of(self, host: str) -> SingleFlight[list[SocketAddress]]:
        with self._lock:
            look_up = self._look_ups.get(host)
            if look_up is None:
                if len(self._look_ups) >= _MAX_NAMES:
                    self._look_ups.clear()
                    self._known.clear()
                look_up = SingleFlight(f"hicache-look-up-{host}", partial(self._look_up, host))
                self._look_ups[host] = look_up
            return look_up

    def _look_up(self, host: str) -> list[SocketAddress]:
        answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        found = [(int(family), address) for family, _, _, _, address in answers]
        if not found:
            raise OSError(None, "it has no address")
        self._known[host] = found
        return found


def _literal_address(host: str) -> SocketAddress | None:
    """Return the address if `host` is an IP address as text. None if `host` is a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return socket.AF_INET, (host, 0)
    return None if address.scope_id else (socket.AF_INET6, (host, 0, 0, 0))


RESOLVER = Resolver()
os.register_at_fork(after_in_child=RESOLVER.reset)
