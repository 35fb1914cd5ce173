"""Exchange data over sockets. Only the compiled module can do this.

Without the compiled module, a backend uses the path that it needs for TLS anyway, through Python's
`ssl`, and exchanges the same bytes. Check `hicache_storage.native.implementation` before a call.
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
"""Verdicts for an exchange, besides its reply's status, 0 (unfinished) and a negated errno."""


def run_exchanges(
    fds: Sequence[int],
    requests: Sequence[Pieces],
    pages: Sequence[Pieces],
    slots: Buffer,
    states: Buffer,
    deadline_s: float,
    revocables: Sequence[bytearray] = (),
) -> int:
    """Send HTTP requests and receive their replies, one at a time on each connection.

    When an exchange has ended, its connection carries the next exchange that has not begun, unless
    the reply was a 429 or its status is 500 or higher. A reply that is not plain stops its exchange
    before any byte after the head is looked at, and the caller continues from the state. A plain
    reply is a final HTTP/1.1 reply without `connection`, except `keep-alive`. It has no body, or a
    body with one `content-length` and without `transfer-encoding` that fits into the page (for a 200)
    or into the slot.

    Args:
        fds: Sockets that are connected or connecting.
        requests: The pieces of each request, including its body.
        pages: The memory for the body of each reply with status 200. Empty: the body goes to the slot.
        slots: Memory for the head of each reply and for a small body. All slots have the same size.
        states: Six 64-bit integers for each exchange, which the call updates: the verdict, the index of
            the connection (-1: not begun), the bytes sent, the bytes received in the slot, the size of
            the head (0: incomplete) and the bytes of the page.
        deadline_s: The time of `time.monotonic` at which the call ends.
        revocables: The state of each exchange's memory, as for `digests`: its page, or the pieces of its
            request after the first. Each access moves at most 272 KiB.

    Returns:
        0, or a negated errno. The verdict for an exchange is the status of its reply, 0 if it is
        unfinished, STOPPED, STALE if its connection was not idle, REVOKED, or a negated errno. REVOKED:
        if anything was sent, end the connection.
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
    states: Sequence[bytearray] = (),
) -> tuple[list[int], int, bytes]:
    """Send requests, and receive one RESP bulk string for each page, until a reply is something else.

    Args:
        fd: A connected socket.
        requests: The request for each page.
        sent: How many requests have been sent already.
        head: The bytes of the first reply that have arrived, at most 4.
        pages: The memory of each page. The bulk string for a page has as many bytes as its pieces.
        window: How many requests may be under way at once. More are sent when half of them are answered.
        deadline_s: The time of `time.monotonic` after which the verdict is -ETIMEDOUT.
        states: The state of each page, as for `digests`. Each access receives at most 256 KiB.

    Returns:
        The verdicts, how many requests have been sent by now, and the bytes of the next reply that have
        arrived. A verdict is HIT, MISS for a null, or REVOKED. A page that is revoked early is not
        requested; if it is revoked later, the rest of its reply is received and lost. The last verdict
        may be WRONG (a different length or a damaged end), NO_BULK (a different kind of reply, whose
        head is returned), or a negated errno. After WRONG or an errno the returned bytes mean nothing.
    """
    raise NotImplementedError


def exchange_lines(
    fd: int,
    requests: Sequence[Pieces],
    replies: Sequence[int],
    window: int,
    deadline_s: float,
    states: Sequence[bytearray] = (),
) -> tuple[int, bytes, list[int]]:
    """Send requests, and receive all lines of their replies.

    Args:
        fd: A connected socket.
        requests: The pieces of each request.
        replies: The number of lines in the reply to each request, from 1 to 4096.
        window: How many requests may be under way at once, as in `fetch_bulks`.
        deadline_s: The time of `time.monotonic` after which the verdict is -ETIMEDOUT.
        states: The state of each request's memory, as for `digests`. The first and the last piece of a
            revocable request are not revocable. Each access sends at most 272 KiB.

    Returns:
        The verdict, all bytes that arrived, and the positions of the requests that were skipped: their
        memory was revoked before any byte was sent. The verdict is HIT, WRONG after a line that is
        longer than 4096 bytes or is not a one-line RESP reply, REVOKED, or a negated errno. REVOKED: the
        first request without a complete reply was revoked when a part of it was sent. The ones before
        it were carried out. End the connection, so that it never is.
    """
    raise NotImplementedError
