"""GET, SET and STRLEN of pages in RESP2, between a connection and the caller's memory.

A page is sent from its segments and received into them, without a copy. Over a plain socket one
call of the compiled data plane does this for all pages. Over TLS, or without the compiled module,
Python sends and reads the same bytes. It receives a page together with the end of its reply and the
beginning of the next one.

The memory of a page that has a `Page.revocable` is accessed without waiting, within accesses. If it is
revoked while its reply arrives, the rest of the reply is received and lost. If that happens while it is
sent, the connection ends: the server carries out no request that it does not have whole.

No page is used before its whole reply is known to be right: `settle` is called for a page when its
verdict is certain, in the order of the requests.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_backends.redis.replies import ErrorReply, Reply, WrongReply
from hicache_storage import native
from hicache_storage.backend_support.revocable import is_revoked, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.backend_support.deadline_socket import DeadlineSocket
    from hicache_storage.page import Page

    Settle = Callable[[int, Reply], None]

WINDOW_NBYTES = 1 << 19
"""How many bytes of small pages are in flight at once. Sending them takes less than a round trip."""
_MAX_WINDOW_PAGES = 512
_MOVED_NBYTES = 32 << 10
"""The size from which a server receives a value in its final place (PROTO_MBULK_BIG_ARG)."""
_HEAD_NBYTES = 4
"""The length of the shortest reply."""
_MISS = b"$-1\r"
_END = b"\r\n"
_MAX_LINE_NBYTES = 4096
_MAX_INTEGER_NBYTES = len(b":9223372036854775807")
_LENGTHS = 1024
"""How many lengths are requested at once."""
_MORE_REPLIES = "the server sent more replies than there were requests"


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request that stores one page: list the page, set it, and list it again.

    The page is listed before it is set, so that it is in its index even if the writer dies. It is
    listed again afterwards, because a remover may have taken it out of the index in between.
    """

    key: bytes
    nbytes: int
    options: tuple[bytes, ...] = ()
    """The options of SET, which follow the page."""
    index_command: tuple[bytes, ...] = ()
    """The command that lists the page. Empty: the page is already listed."""

    def framing(self) -> tuple[bytes, bytes]:
        """Return the bytes before and after the page."""
        listed = _pack(self.index_command)
        before = b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            *(listed, 3 + len(self.options), len(self.key), self.key, self.nbytes),
        )
        return before, b"\r\n%b%b" % (_arguments(self.options), listed)

    @property
    def verdict_at(self) -> int:
        """The position of the page's reply among the replies."""
        return 1 if self.index_command else 0

    @property
    def reply_count(self) -> int:
        return 3 if self.index_command else 1


def _pack(command: tuple[bytes, ...]) -> bytes:
    return b"*%d\r\n%b" % (len(command), _arguments(command)) if command else b""


def _arguments(values: tuple[bytes, ...]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(value), value) for value in values])


def window_of(depth: int, page_nbytes: int) -> int:
    """Return how many pages of `page_nbytes` may be in flight at once."""
    return max(depth, min(_MAX_WINDOW_PAGES, WINDOW_NBYTES // page_nbytes))


def set_window(depth: int, page_nbytes: int, *, is_alone: bool) -> int:
    """Return how many pages of `page_nbytes` a connection that sets pages may have in flight.

    If a large page waits behind another one, the server reads its begin too early, and copies it once
    more. So one page is in flight if that is enough: others keep the server busy, or `depth` is 1.

    Args:
        depth: The setting.
        page_nbytes: The size of each page.
        is_alone: No other connection of this process is in use.
    """
    least = _MOVED_NBYTES if depth == 1 else WINDOW_NBYTES
    is_one = page_nbytes >= least and (depth == 1 or not is_alone)
    return 1 if is_one else window_of(depth, page_nbytes)


# --- get -----------------------------------------------------------------------------------------


def get_pages(
    sock: DeadlineSocket, keys: Sequence[bytes], pages: Sequence[Page], window: int, settle: Settle
) -> None:
    """Read each page. Settle it as True, as False (missing, or not a page), or as an error.

    Raises:
        WrongReply: A reply has the wrong length or kind. If the length is wrong, its page has settled as
            False. Later pages have not settled.
        OSError: The connection failed. Some pages may have settled.
    """
    requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
    reader = _PageReader(sock)
    sent = done = 0
    while done < len(keys):
        if sock.is_compiled:
            count, ahead = reader.read_many(
                requests[done:], pages[done:], done, settle, sent=sent - done, window=window
            )
            done, sent = done + count, done + ahead
            continue
        if sent < len(keys) and sent - done <= window // 2:
            until = sent
            while until < min(len(keys), done + window) and not is_revoked(pages[until]):
                until += 1
            sock.send_buffers([memoryview(b"".join(requests[sent:until]))])
            sent = until
        if done == sent:  # the page is revoked, and no request is under way
            settle(done, False)
            sent += 1
        else:
            settle(done, reader.read(pages[done], done, settle, more=done + 1 < sent))
        done += 1


class _PageReader:
    """A reader of replies to GET. The size of each page is known."""

    def __init__(self, sock: DeadlineSocket) -> None:
        self._socket = sock
        self._head = memoryview(bytearray(_HEAD_NBYTES))
        self._end = memoryview(bytearray(len(_END)))
        self._missing = [self._head]
        """The part of the next reply's head that has not arrived yet."""

    def read_many(
        self,
        requests: Sequence[bytes],
        pages: Sequence[Page],
        start: int,
        settle: Settle,
        *,
        sent: int,
        window: int,
    ) -> tuple[int, int]:
        """Settle replies, up to the first without a page, in one call of the data plane.

        Return how many have settled, and how many requests have been sent. `sent`: how many
        requests were sent before.
        """
        arrived = bytes(self._head)[: _HEAD_NBYTES - sum(map(len, self._missing))]
        sock, memory = self._socket, [page.segments for page in pages]
        verdicts, sent, arrived = native.fetch_bulks(
            *(sock.fileno(), requests, sent, arrived, memory, window, sock.deadline.end_s),
            states_of(pages),
        )
        last = verdicts[-1]
        is_plain = last in (native.HIT, native.MISS, native.REVOKED)
        plain = verdicts if is_plain else verdicts[:-1]
        for position, verdict in enumerate(plain, start):
            settle(position, verdict == native.HIT)
        position = start + len(plain)
        if last < 0:
            raise sock.error_of(-last)
        if last == native.WRONG:
            settle(position, False)
            raise WrongReply("a page has the wrong length, or its reply has an unexpected form")
        self._head[: len(arrived)] = arrived
        self._missing = [self._head[len(arrived) :]] if len(arrived) < _HEAD_NBYTES else []
        if last == native.NO_BULK:
            follows = sent > len(verdicts)
            settle(position, self.read(pages[position - start], position, settle, more=follows))
        return len(verdicts), sent

    def read(self, page: Page, position: int, settle: Settle, *, more: bool) -> Reply:
        """Read the next reply.

        `more`: another reply follows, and part of its head may be read as well.
        """
        sock = self._socket
        sock.receive_into(self._missing)
        head = bytes(self._head)
        self._missing = [self._head]
        if head == _MISS and self._ends_as_miss(more=more):
            return False
        if head[:1] == b"-":
            return ErrorReply.from_line(self._line(head[1:]).decode(errors="replace"))
        header = b"$%d\r\n" % page.nbytes
        if header[:_HEAD_NBYTES] == head:
            rest = memoryview(bytearray(len(header) - _HEAD_NBYTES))
            buffers = [*([rest] if rest else []), *page.segments, self._end]
            buffers += [self._head] if more else []
            if page.revocable is not None:
                buffers = buffers[: 1 if rest else 0]
            left = sock.receive_into(buffers, len(rest))
            if header[_HEAD_NBYTES:] == bytes(rest):
                is_whole = True
                if page.revocable is not None:
                    for segment in page.segments:
                        is_whole = sock.receive_within(page.revocable, segment) and is_whole
                    left = [self._end, *([self._head] if more else [])]
                self._finish(left, more=more)
                if bytes(self._end) == _END:
                    return is_whole
        if head[:1] == b"$":
            settle(position, False)
        raise WrongReply("a page has the wrong length, or its reply has an unexpected form")

    def _ends_as_miss(self, *, more: bool) -> bool:
        """Receive the end of a reply that began as a miss. Return False if it ends differently."""
        self._finish([self._end[:1], *([self._head] if more else [])], more=more)
        return bytes(self._end[:1]) == _END[1:]

    def _finish(self, buffers: list[memoryview], *, more: bool) -> None:
        """Receive the rest of a reply, and as much of the next one's head as is available."""
        nbytes = sum(map(len, buffers))
        left = self._socket.receive_into(buffers, nbytes - (_HEAD_NBYTES if more else 0))
        if more:
            self._missing = left

    def _line(self, begun: bytes) -> bytes:
        """Read the rest of a line byte by byte. The bytes after it belong to the next reply."""
        line = bytearray(begun)
        byte = memoryview(bytearray(1))
        if _END in begun[:-1]:
            raise WrongReply("an error has no text")
        while not line.endswith(_END):
            if len(line) > _MAX_LINE_NBYTES:
                raise WrongReply("an error is too long")
            self._socket.receive_into([byte])
            line += byte
        return bytes(line[: -len(_END)])


# --- set -----------------------------------------------------------------------------------------


def set_pages(
    sock: DeadlineSocket,
    requests: Sequence[PageRequest],
    pages: Sequence[Page],
    window: int,
    settle: Settle,
) -> None:
    """Store each page. Settle it as the list of its replies: True (set), None (the key exists)...

    Raises:
        WrongReply: A reply has the wrong kind.
        OSError: The connection failed. Requests that have not settled may or may not be carried out.
    """
    if sock.is_compiled:
        _set_in_one_call(sock, requests, pages, window, settle)
        return
    lines = _LineReader(sock)
    sent, end = 0, len(requests)
    skipped: set[int] = set()
    for position, request in enumerate(requests):
        if sent < end and sent - position <= window // 2:
            until = min(end, position + window)
            sent = _send_requests(sock, requests[:until], pages, sent, skipped)
            end = end if sent == until else sent
        if position == end or position in skipped:
            settle(position, [False] * request.reply_count)
        else:
            settle(position, [_parse_reply(lines.read()) for _ in range(request.reply_count)])
        if position == end:
            sock.shut_down()
            return
    lines.check_done()


def _send_requests(
    sock: DeadlineSocket,
    requests: Sequence[PageRequest],
    pages: Sequence[Page],
    sent: int,
    skipped: set[int],
) -> int:
    """Send requests from `sent` on. Return how many are sent, up to one that was revoked meanwhile.

    A page that was revoked before is skipped.
    """
    if not any(page.revocable for page in pages[sent : len(requests)]):
        sock.send_buffers(_buffers(requests[sent:], pages[sent : len(requests)]))
        return len(requests)
    for position in range(sent, len(requests)):
        page, (before, after) = pages[position], requests[position].framing()
        if is_revoked(page):
            skipped.add(position)
        elif page.revocable is None:
            sock.send_buffers(_buffers(requests[position : position + 1], [page]))
        else:
            sock.send_buffers([memoryview(before)])
            if not all(sock.send_within(page.revocable, segment) for segment in page.segments):
                return position
            sock.send_buffers([memoryview(after)])
    return len(requests)


def _set_in_one_call(
    sock: DeadlineSocket,
    requests: Sequence[PageRequest],
    pages: Sequence[Page],
    window: int,
    settle: Settle,
) -> None:
    """Store each page in one call of the data plane, as `set_pages` does."""
    pieces: list[list[Any]] = []
    for request, page in zip(requests, pages, strict=True):
        before, after = request.framing()
        pieces.append([before, *page.segments, after])
    counts = [request.reply_count for request in requests]
    _exchange(sock, pieces, counts, window, settle, states=states_of(pages))


def _exchange(
    sock: DeadlineSocket,
    pieces: Sequence[Sequence[Any]],
    counts: Sequence[int],
    window: int,
    settle: Settle,
    *,
    states: Sequence[bytearray] = (),
) -> None:
    """Send requests and settle each as the list of its one-line replies, in one call.

    Those that were revoked settle as lists of False.
    """
    verdict, received, skipped = native.exchange_lines(
        sock.fileno(), pieces, counts, window, sock.deadline.end_s, states
    )
    *lines, unfinished = received.split(_END)
    replies = iter(lines)
    for position, count in enumerate(counts):
        if position in skipped:
            settle(position, [False] * count)
            continue
        some = list(itertools.islice(replies, count))
        if len(some) < count:
            if verdict == native.REVOKED:
                settle(position, [False] * count)
                sock.shut_down()
                return
            break
        settle(position, [_parse_reply(line) for line in some])
    else:
        if unfinished or next(replies, None) is not None:
            raise WrongReply(_MORE_REPLIES)
        return
    if verdict < 0:
        raise sock.error_of(-verdict)
    raise WrongReply("a reply has an unexpected form")


def _buffers(requests: Sequence[PageRequest], pages: Sequence[Page]) -> list[memoryview]:
    buffers: list[memoryview] = []
    between = b""
    for request, page in zip(requests, pages, strict=True):
        before, after = request.framing()
        buffers.append(memoryview(between + before))
        buffers += page.segments
        between = after
    buffers.append(memoryview(between))
    return buffers


def _parse_reply(line: bytes) -> Reply:
    if line == b"+OK":
        return True
    if line == b"$-1":
        return None
    if line[:1] == b"-":
        return ErrorReply.from_line(line[1:].decode(errors="replace"))
    if line[:1] == b":" and line[1:].isdigit() and len(line) <= _MAX_INTEGER_NBYTES:
        return int(line[1:])
    raise WrongReply("a reply has an unexpected form")


# --- lengths -------------------------------------------------------------------------------------


def get_lengths(sock: DeadlineSocket, keys: Sequence[bytes]) -> list[int | ErrorReply]:
    """Return the length of each key's value, 0 if there is none, or an error.

    Raises:
        WrongReply: A reply has the wrong kind.
        OSError: The connection failed.
    """
    parts = [keys[start : start + _LENGTHS] for start in range(0, len(keys), _LENGTHS)]
    requests = [
        b"".join([b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (len(key), key) for key in part])
        for part in parts
    ]
    replies: list[Reply] = []
    if sock.is_compiled:
        pieces = [[request] for request in requests]
        _exchange(sock, pieces, [*map(len, parts)], 1, lambda _, found: replies.extend(found))
    else:
        lines = _LineReader(sock)
        for request, part in zip(requests, parts, strict=True):
            sock.send_buffers([memoryview(request)])
            replies += [_parse_reply(lines.read()) for _ in part]
        lines.check_done()
    if not all(type(reply) is int or isinstance(reply, ErrorReply) for reply in replies):
        raise WrongReply("a length is not a number")
    return replies


# --- lines ---------------------------------------------------------------------------------------


class _LineReader:
    """A reader of one-line replies, the only kind of reply to SET, ZADD and STRLEN."""

    def __init__(self, sock: DeadlineSocket) -> None:
        self._socket = sock
        self._lines: list[bytes] = []
        self._unfinished = b""

    def read(self) -> bytes:
        while not self._lines:
            if len(self._unfinished) > _MAX_LINE_NBYTES:
                raise WrongReply("a reply is too long")
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("the server ended the connection")
            *lines, self._unfinished = (self._unfinished + received).split(_END)
            self._lines = lines[::-1]
        return self._lines.pop()

    def check_done(self) -> None:
        if self._lines or self._unfinished:
            raise WrongReply(_MORE_REPLIES)
