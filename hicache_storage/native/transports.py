"""Exchanges over sockets that only the compiled module carries.

Without it, a backend exchanges the same bytes by the path that serves TLS, which Python's `ssl` needs
anyway. Look at `hicache_storage.native.implementation` before a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from hicache_storage.native.reference.pieces import Pieces

VERDICT, LANE, SENT, RECEIVED, HEAD_NBYTES, FILLED = range(6)
"""The numbers that describe how far an exchange has come."""
STATE_COUNT = 6
STOPPED, STALE = 1, 2
"""Verdicts on an exchange beside the status of its reply, 0 (unfinished) and a negated errno."""


def run_exchanges(
    fds: Sequence[int],
    requests: Sequence[Pieces],
    pages: Sequence[Pieces],
    slots: Buffer,
    states: Buffer,
    deadline_s: float,
) -> int:
    """Send HTTP requests and receive their replies, one at a time on each connection.

    A connection that has carried an exchange carries the next one that has not begun, unless the reply
    was a 429 or its status is 500 or higher. A reply that is not plain stops its exchange before a byte
    behind the head is judged: the caller goes on from the state. Plain is a final reply of HTTP/1.1
    without `connection` but `keep-alive`, that has no body, or a body with one `content-length` and
    without `transfer-encoding` that fits into the page (a 200) or into the slot.

    Args:
        fds: Connected sockets, or sockets that are connecting.
        requests: The pieces of each request, with its body.
        pages: The memory for the body of each reply with status 200. Empty: the body goes to the slot.
        slots: Memory for the head of each reply and for a small body, of one size each.
        states: Six 64-bit integers an exchange, which the call updates: the verdict, the index of
            the connection (-1: not begun), the bytes sent, the bytes received in the slot, the bytes of
            the head (0: not whole) and the bytes of the page.
        deadline_s: The time of `time.monotonic` when the call ends.

    Returns:
        0, or a negated errno. The verdict on an exchange is the status of its reply; 0 where it is
        unfinished; STOPPED; STALE where its connection was not idle; or a negated errno.
    """
    raise NotImplementedError
