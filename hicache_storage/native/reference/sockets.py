"""Bytes over a connected socket, in Python."""

from __future__ import annotations

import errno
import select
import socket
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.native.reference.pieces import (
    HIT,
    IOV_MAX,
    MISS,
    NO_BULK,
    WRONG,
    nbytes_of,
    pieces_after,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from hicache_storage.native.reference.pieces import Pieces

_HEAD_NBYTES = 4
_LINE_MOST = 4096
_STEP_NBYTES = 1 << 14
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_T = TypeVar("_T")


def send_pieces(fd: int, pieces: Pieces, deadline_s: float) -> int:
    """Send all pieces over a connected socket. Return 0 or a negated errno.

    ETIMEDOUT stands for the deadline.
    """
    try:
        with borrowed(fd) as connection:
            todo = pieces_after([memoryview(piece) for piece in pieces], 0)
            while todo:
                sent = _when(
                    connection,
                    select.POLLOUT,
                    deadline_s,
                    partial(connection.sendmsg, todo[:IOV_MAX], (), _SEND_FLAGS),
                )
                todo = pieces_after(todo, sent)
    except OSError as error:
        return -(error.errno or 0)
    return 0


def receive_pieces(fd: int, pieces: Pieces, least: int, deadline_s: float) -> int:
    """Receive into the pieces, in order, at least `least` bytes or all that they can hold.

    Return the number of bytes or a negated errno. ETIMEDOUT stands for the deadline, ECONNRESET for a
    connection that the other side has ended.
    """
    try:
        with borrowed(fd) as connection:
            return _receive(connection, [memoryview(piece) for piece in pieces], least, deadline_s)
    except OSError as error:
        return -(error.errno or 0)


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
    fits = len(head) <= _HEAD_NBYTES and 0 <= sent <= len(pages) and window > 0
    if not fits or len(requests) != len(pages) or (head and not sent):
        raise ValueError("requests, pages and window do not fit together")
    verdicts: list[int] = []
    with borrowed(fd) as connection:
        for index, page in enumerate(pages):
            end = _window_end(index, sent, len(pages), window)
            verdict = send_pieces(fd, requests[sent:end], deadline_s)
            sent = end
            if verdict >= 0:
                follows = index + 1 < sent
                try:
                    verdict, head = _receive_bulk(connection, head, page, follows, deadline_s)
                except OSError as error:
                    verdict, head = -(error.errno or 0), b""
            verdicts.append(verdict)
            if verdict not in (HIT, MISS):
                break
    return verdicts, sent, head


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
    count = len(requests)
    if len(replies) != count:
        raise ValueError("the sequences of a batch do not fit together")
    if window < 1 or not all(0 < lines <= _LINE_MOST for lines in replies):
        raise ValueError("requests, replies and window do not fit together")
    received = bytearray()
    done = sent = come = start = 0
    while done < count:
        end = _window_end(done, sent, count, window)
        pieces = [piece for request in requests[sent:end] for piece in request]
        failed = send_pieces(fd, pieces, deadline_s)
        sent = end
        if failed:
            return failed, bytes(received)
        if come < replies[done]:
            step = bytearray(_STEP_NBYTES)
            got = receive_pieces(fd, [step], 1, deadline_s)
            if got < 0:
                return got, bytes(received)
            received += step[:got]
        lines, start = _count_lines(received, start)
        if lines < 0:
            return WRONG, bytes(received)
        come += lines
        while done < sent and come >= replies[done]:
            come -= replies[done]
            done += 1
    return HIT, bytes(received)


def _count_lines(received: bytearray, start: int) -> tuple[int, int]:
    """Return the number of whole lines, and their end; -1 where the next one is no reply or too long."""
    lines = 0
    while start < len(received):
        newline = received.find(b"\n", start)
        end = newline if newline >= 0 else len(received)
        if received[start] not in b"+-:$" or end - start > _LINE_MOST:
            return -1, start
        if newline < 0:
            break
        start = newline + 1
        lines += 1
    return lines, start


def _window_end(done: int, sent: int, count: int, window: int) -> int:
    """Return up to which request to send: more are sent when half of the window is answered."""
    is_full = sent == count or sent - done > window // 2
    return sent if is_full else max(sent, min(count, done + window))


# --- one connection ------------------------------------------------------------------------------


@contextmanager
def borrowed(fd: int) -> Generator[socket.socket]:
    """Yield a socket object for `fd`, which stays open."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()


def _when(connection: socket.socket, event: int, deadline_s: float, call: Callable[[], _T]) -> _T:
    """Return the result of a non-blocking call. Wait until the socket is ready, by the deadline."""
    while True:
        try:
            return call()
        except BlockingIOError:
            left_s = deadline_s - time.monotonic()
            poll = select.poll()
            poll.register(connection, event)
            if left_s <= 0 or not poll.poll(left_s * 1000 + 1):
                raise TimeoutError(errno.ETIMEDOUT, "the deadline has passed") from None


def _receive(
    connection: socket.socket, views: list[memoryview], least: int, deadline_s: float
) -> int:
    received = 0
    todo = pieces_after(views, 0)
    while todo and received < least:
        call = partial(connection.recvmsg_into, todo[:IOV_MAX], 0, socket.MSG_DONTWAIT)
        step = _when(connection, select.POLLIN, deadline_s, call)[0]
        if not step:
            raise ConnectionResetError(errno.ECONNRESET, "the other side has ended the connection")
        received += step
        todo = pieces_after(todo, step)
    return received


def _receive_bulk(
    connection: socket.socket, head: bytes, page: Pieces, more: bool, deadline_s: float
) -> tuple[int, bytes]:
    """Return the verdict on one reply, and the bytes of the next reply that have arrived."""
    begun = memoryview(bytearray(_HEAD_NBYTES))
    begun[: len(head)] = head
    _receive(connection, [begun[len(head) :]], _HEAD_NBYTES - len(head), deadline_s)
    following = [memoryview(bytearray(_HEAD_NBYTES))] if more else []
    header = b"$%d\r\n" % nbytes_of(page)
    if bytes(begun) == b"$-1\r":
        rest, expected, views = 1, b"\n", [memoryview(bytearray(1))]
        found = views
    elif bytes(begun) == header[:_HEAD_NBYTES]:
        tail, end = memoryview(bytearray(len(header) - _HEAD_NBYTES)), memoryview(bytearray(2))
        views = [tail, *(memoryview(piece) for piece in page), end]
        _receive(connection, [tail], len(tail), deadline_s)
        if bytes(tail) != header[_HEAD_NBYTES:]:
            return WRONG, b""
        views, found = views[1:], [end]
        rest, expected = nbytes_of(page) + 2, b"\r\n"
    else:
        return (WRONG if bytes(begun[:1]) == b"$" else NO_BULK), bytes(begun)
    received = _receive(connection, [*views, *following], rest, deadline_s)
    verdict = MISS if expected == b"\n" else HIT
    next_head = bytes(following[0][: received - rest]) if following else b""
    return (verdict if bytes(found[0]) == expected else WRONG), next_head
