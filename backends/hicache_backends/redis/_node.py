"""One server, and the few connections to it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_backends.redis._link import Link
from hicache_storage.errors import StorageClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_backends.redis._wire import Deadline

_CLOSE_LIMIT_S = 10.0


class Node:
    """Lends the connections to one server, each to one call at a time. Thread-safe."""

    def __init__(self, place: str, make: Callable[[], object], limit: int) -> None:
        self.place = place
        """Its address, for people."""
        self.connections_made = 0
        self._make = make
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._closed = False

    @contextmanager
    def lent(self, deadline: Deadline) -> Generator[Link, None, None]:
        """A connection that is ready. What fails on it ends it, and those that were idle meanwhile."""
        link = self._lease(deadline)
        try:
            self.connections_made += link.ready(deadline)
            self._must_be_open()  # `close` cannot end what is being connected
            yield link
        except BaseException:
            self._after_failure(link)
            raise
        self._give_back(link)

    def close(self) -> None:
        """End all connections, those in use too; wait until nobody uses one. Idempotent."""
        with self._changed:
            self._closed = True
            for link in self._busy:
                link.hang_up()
            self._drop_idle()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy, _CLOSE_LIMIT_S)

    def abandon(self) -> None:
        """In a forked child: close what was inherited, which ends nothing for the parent.

        Takes no lock: it may have been held by a thread that the child does not have.
        """
        self._closed = True
        for link in (*self._idle, *self._busy):
            link.drop()

    def _lease(self, deadline: Deadline) -> Link:
        with self._changed:
            if not self._changed.wait_for(self._has_turn, deadline.left_s()):
                raise TimeoutError("all connections are in use")
            self._must_be_open()
            link = self._idle.pop() if self._idle else Link(self._make())
            self._busy.add(link)
            return link

    def _must_be_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"the connections to {self.place} were closed: open a new storage")

    def _has_turn(self) -> bool:
        return self._closed or len(self._busy) < self._limit

    def _give_back(self, link: Link) -> None:
        with self._changed:
            self._busy.remove(link)
            if self._closed:
                link.drop()
            else:
                self._idle.append(link)
            self._changed.notify_all()

    def _after_failure(self, link: Link) -> None:
        with self._changed:
            self._busy.remove(link)
            link.drop()
            self._drop_idle()  # the server may have gone
            self._changed.notify_all()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().drop()
