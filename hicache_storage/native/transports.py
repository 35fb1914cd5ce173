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

__all__ = [
    "FILLED",
    "HEAD_NBYTES",
    "LANE",
    "RECEIVED",
    "SENT",
    "STALE",
    "STATE_COUNT",
    "STOPPED",
    "VERDICT",
    "exchange_lines",
    "fetch_bulks",
    "run_exchanges",
]

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


def fetch_bulks(
    fd: int,
    requests: Sequence[bytes],
    sent: int,
    head: bytes,
    pages: Sequence[Pieces],
    window: int,
    deadline_s: float,
) -> tuple[list[int], int, bytes]:
    """Send requests, and receive one RESP bulk string a page, up to the first reply that is none.

    Args:
        fd: A connected socket.
        requests: The request for each page.
        sent: The number of requests that are sent already.
        head: The bytes of the first reply that have arrived: 4 at most.
        pages: The memory of each page. The bulk string of a page has as many bytes as its pieces.
        window: The number of requests that are on their way at once. More are sent when half of them
            are answered.
        deadline_s: The time of `time.monotonic` after which the verdict is -ETIMEDOUT.

    Returns:
        The verdicts, the number of requests that are sent now, and the bytes of the next reply that
        have arrived. A verdict is HIT, or MISS for a null. The last one may be WRONG (another length,
        or a damaged end), NO_BULK (another kind of reply, whose head is returned), or a negated errno.
        After WRONG and an errno the bytes mean nothing.
    """
    raise NotImplementedError


def exchange_lines(
    fd: int, requests: Sequence[Pieces], replies: Sequence[int], window: int, deadline_s: float
) -> tuple[int, bytes]:
    """Send requests, and receive as many lines as their replies have.

    Args:
        fd: A connected socket.
        requests: The pieces of each request.
        replies: The number of lines of the reply to each request, from 1 to 4096.
        window: The number of requests that are on their way at once, as in `fetch_bulks`.
        deadline_s: The time of `time.monotonic` after which the verdict is -ETIMEDOUT.

    Returns:
        The verdict, and all bytes that have come. The verdict is HIT; WRONG after a line that is longer
        than 4096 bytes or is no RESP reply of one line; or a negated errno.
    """
    raise NotImplementedError
