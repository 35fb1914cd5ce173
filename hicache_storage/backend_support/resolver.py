"""Name look-ups with a time limit, which the system's own have not.

A look-up runs in a thread of its own, and nobody can end it. Therefore one at most is under way for a
name, whoever waits for it; and a server whose name was resolved before is reached at its old addresses
while the name server is silent.
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
"""A family, and what `socket.connect` takes in it."""

_OLD_ADDRESSES_AFTER_S = 1.0
"""So old is a look-up when calls go on with addresses that an earlier one found."""
_OLD_ADDRESSES_SHARE = 0.25
"""Of what is left of a call: no call waits longer for new addresses while there are old ones."""
_SILENT = (socket.EAI_AGAIN, socket.EAI_FAIL)
"""The name server did not answer; what it said before may still hold."""
_MOST_NAMES = 1024


class Resolver:
    """The look-ups of this process. Thread-safe; a forked child begins anew."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: the threads of a parent are not there, its locks may be held."""
        self._lock = threading.Lock()
        self._look_ups: dict[str, SingleFlight[list[SocketAddress]]] = {}
        self._known: dict[str, list[SocketAddress]] = {}

    def addresses(self, host: str, port: int, deadline: Deadline) -> list[SocketAddress]:
        """Return the addresses of a host, in the order in which they should be tried.

        Raises:
            StorageTimeout: The name server did not answer in time.
            OSError: The name does not exist, or cannot be looked up.
        """
        literal = _literal(host)
        found = [literal] if literal else self._found(host, deadline)
        return [(family, (where[0], port, *where[2:])) for family, where in found]

    def _found(self, host: str, deadline: Deadline) -> Sequence[SocketAddress]:
        known = self._known.get(host)
        look_up = self._look_up_of(host)
        limit_s = deadline.remaining_s()
        if known:
            patience_s = max(0.0, _OLD_ADDRESSES_AFTER_S - look_up.age_s())
            limit_s = min(patience_s, limit_s * _OLD_ADDRESSES_SHARE)
        try:
            flight = look_up.ended(limit_s)
        except StorageUnavailable:
            if known:
                return known
            raise
        error = None if flight is None else flight.exception()
        if flight is not None and error is None:
            return flight.result()
        if known and (error is None or getattr(error, "errno", None) in _SILENT):
            return known
        if error is None:
            raise StorageTimeout(
                f"the look-up of the name {host!r} did not end within {deadline.timeout_s:g} s"
            )
        said = getattr(error, "strerror", None) or "it is no name of a host"
        raise ConnectionError(f"the name {host!r} cannot be looked up: {said}") from error

    def _look_up_of(self, host: str) -> SingleFlight[list[SocketAddress]]:
        with self._lock:
            look_up = self._look_ups.get(host)
            if look_up is None:
                if len(self._look_ups) >= _MOST_NAMES:
                    self._look_ups.clear()
                    self._known.clear()
                look_up = SingleFlight(f"hicache-look-up-{host}", partial(self._looked_up, host))
                self._look_ups[host] = look_up
            return look_up

    def _looked_up(self, host: str) -> list[SocketAddress]:
        told = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        found = [(int(family), where) for family, _, _, _, where in told]
        if not found:
            raise OSError(None, "it has no address")
        self._known[host] = found
        return found


def _literal(host: str) -> SocketAddress | None:
    """Return the address that `host` is written as, if it is one: nobody has to be asked."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv4Address):
        return socket.AF_INET, (host, 0)
    return None if address.scope_id else (socket.AF_INET6, (host, 0, 0, 0))


RESOLVER = Resolver()
os.register_at_fork(after_in_child=RESOLVER.reset)
