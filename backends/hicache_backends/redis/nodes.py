"""The servers that were met so far."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hicache_backends.redis.server_pool import Node

if TYPE_CHECKING:
    from hicache_backends.redis.access import Access
    from hicache_backends.redis.address import Address
    from hicache_storage.backend_support.deadline import Deadline


class Nodes:
    """Servers that are opened alike, each with its connections. Thread-safe."""

    def __init__(self, access: Access, limit: int) -> None:
        self._access = access
        self._limit = limit
        self._lock = threading.Lock()
        self._nodes: dict[Address, Node] = {}
        self._closed = False

    def at(self, address: Address) -> Node:
        """Return the server at an address, the same one each time."""
        with self._lock:
            if address not in self._nodes:
                self._nodes[address] = Node(address, self._access, self._limit)
                if self._closed:
                    self._nodes[address].end()
            return self._nodes[address]

    @property
    def connections_made(self) -> int:
        """Since the start: after another one has been made the server may be another one too."""
        return sum(node.connections_made for node in list(self._nodes.values()))

    def end(self) -> None:
        """End all connections to all servers, and make no more. Idempotent."""
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        for node in nodes:
            node.end()

    def await_end(self, deadline: Deadline) -> None:
        """Wait until nobody uses a connection."""
        for node in list(self._nodes.values()):
            node.await_end(deadline)

    def abandon(self) -> None:
        """In a forked child: leave everything to the parent. Takes no lock."""
        self._closed = True
        for node in self._nodes.values():
            node.abandon()
