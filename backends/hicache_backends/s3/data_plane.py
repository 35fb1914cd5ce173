"""Carry many requests of one call in one native call, on several connections."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.s3.replies import Reply
from hicache_storage import native
from hicache_storage.backend_support.revocable import states_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.s3.connections import Request

_SLOT_NBYTES = 2048
"""Memory for the head of a reply and a small body. Python receives replies that need more."""
_END_OF_HEAD_NBYTES = 4
_NOT_BEGUN = array("q", [0, -1, 0, 0, 0, 0])


@dataclass(slots=True)
class Progress:
    """How far the data plane has come with a request, and its reply."""

    verdict: int = 0
    """The status of a complete reply, or a verdict of `native.run_exchanges`."""
    lane: int = -1
    """The index of the connection. -1: the request was not begun."""
    sent: int = 0
    received: bytes = b""
    """The beginning of the reply, with the bytes after the head that came with it."""
    head_nbytes: int = 0
    filled: int = 0
    """How many bytes of the page were received."""

    @property
    def is_complete(self) -> bool:
        return self.verdict >= 200

    @property
    def moved(self) -> tuple[int, int, int]:
        """The numbers that grow as long as the server accepts and sends bytes."""
        return self.sent, len(self.received), self.filled

    def reply(self) -> Reply:
        """Return the reply, which must be complete."""
        head = self.received[: self.head_nbytes - _END_OF_HEAD_NBYTES]
        if self.filled:
            return Reply(self.verdict, head, is_page_filled=True)
        return Reply(self.verdict, head, self.received[self.head_nbytes :])


def carry(
    fds: Sequence[int],
    begun: Sequence[Progress],
    requests: Sequence[Request],
    until_s: float,
) -> list[Progress]:
    """Carry requests, one at a time on each connection. Return their progress.

    Args:
        fds: The connections.
        begun: The progress of the first requests, one for each connection.
        requests: The requests. Those after the first begin in order, as connections become idle.
        until_s: The `time.monotonic` time by which the call returns.

    Raises:
        OSError: The sockets can't be polled.
    """
    count = len(requests)
    slots = memoryview(bytearray(count * _SLOT_NBYTES))
    states = _NOT_BEGUN * count
    for number, progress in enumerate(begun):
        received = progress.received
        slots[number * _SLOT_NBYTES :][: len(received)] = received
        at = number * native.STATE_COUNT
        states[at + native.LANE] = number
        states[at + native.SENT] = progress.sent
        states[at + native.RECEIVED] = len(received)
        states[at + native.HEAD_NBYTES] = progress.head_nbytes
        states[at + native.FILLED] = progress.filled
    failed = native.run_exchanges(
        fds,
        [(request.head, *request.body) for request in requests],
        [request.into for request in requests],
        slots,
        states,
        until_s,
        states_of(requests),
    )
    if failed:
        raise OSError(-failed, os.strerror(-failed))
    numbers = states.tolist()
    found: list[Progress] = []
    for number in range(count):
        at = number * native.STATE_COUNT
        verdict, lane, sent, received_nbytes, head_nbytes, filled = numbers[
            at : at + native.STATE_COUNT
        ]
        start = number * _SLOT_NBYTES
        received = bytes(slots[start : start + received_nbytes])
        found.append(Progress(verdict, lane, sent, received, head_nbytes, filled))
    return found
