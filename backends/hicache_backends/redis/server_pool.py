"""One server, and the few connections to it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_backends.redis.link import Link
from hicache_backends.redis.replies import WrongReply
from hicache_storage.errors import StorageClosed, StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_backends.redis.access import Access
    from hicache_backends.redis.address import Address
    from hicache_storage.backend_support.deadline import Deadline


class Node:
    """Lends the connections to one server, each to one call at a time. Thread-safe."""

    def __init__(self, address: Address, access: Access, limit: int) -> None:
        self.address = address
        self.connections_made = 0
        self._access = access
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Link] = []
        self._busy: dict[Link, int] = {}
        """In use, each with the generation that it is of."""
        self._generation = 0
        """Of connections: whoever meets a failure distrusts all that there are."""
        self._closed = False

    @contextmanager
    def lent(self, deadline: Deadline) -> Generator[Link, None, None]:
        """A connection that is ready. What fails on it, or is stale, ends it and all of its age.

        A wrong reply ends it alone: most come of a page that is damaged, on a server that is well.
        """
        link = self._lease(deadline)
        try:
            self.connections_made += link.ready(deadline)
            self._must_be_open()  # `close` cannot end what is being connected
            yield link
        except WrongReply:
            self._give_back(link, is_sound=False, doubts_all=False)
            raise
        except BaseException:
            self._give_back(link, is_sound=False, doubts_all=True)
            raise
        self._give_back(link, is_sound=not link.is_stale, doubts_all=link.is_stale)

    def end(self) -> None:
        """End all connections, those in use too, and make no more. Idempotent."""
        with self._changed:
            self._closed = True
            for link in self._busy:
                link.hang_up()
            self._drop_idle()
            self._changed.notify_all()

    def await_end(self, deadline: Deadline) -> None:
        """Wait until nobody uses a connection: one that is being made cannot be ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, deadline.remaining_s())

    def abandon(self) -> None:
        """In a forked child: close what was inherited, which ends nothing for the parent.

        Takes no lock: it may have been held by a thread that the child does not have.
        """
        self._closed = True
        for link in (*self._idle, *self._busy):
            link.drop()

    def _lease(self, deadline: Deadline) -> Link:
        with self._changed:
            if not self._changed.wait_for(self._has_turn, deadline.remaining_s()):
                raise StorageTimeout(
                    f"all {self._limit} connections were in use for {deadline.timeout_s:g} s"
                )
            self._must_be_open()
            link = self._idle.pop() if self._idle else Link(self.address, self._access)
            self._busy[link] = self._generation
            return link

    def _must_be_open(self) -> None:
        if self._closed:
            raise StorageClosed(
                f"the connections to {self.address} were closed: open a new storage"
            )

    def _has_turn(self) -> bool:
        return self._closed or len(self._busy) < self._limit

    def _give_back(self, link: Link, *, is_sound: bool, doubts_all: bool) -> None:
        with self._changed:
            generation = self._busy.pop(link)
            if doubts_all:  # the server may have gone, or be another one
                self._generation += 1
                self._drop_idle()
            if is_sound and generation == self._generation and not self._closed:
                self._idle.append(link)
            else:
                link.drop()
            self._changed.notify_all()

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().drop()
