"""Pages over a connection, straight from and into the caller's memory.

RESP2. A request that carries a page is its header, the page's segments and its end, in one `sendmsg`; a
page that comes is received into its segments in one `recvmsg_into`, together with the end of its reply
and the beginning of the next. What was read before all of a reply is known to be right is never used:
`settle` is called for a page when its verdict is certain, in the order of the requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.redis.replies import ErrorReply, Reply, WrongReply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.redis.connection import Wire
    from hicache_storage.page import Page

    Settle = Callable[[int, Reply], None]

WINDOW_NBYTES = 1 << 19
"""Of small pages so many bytes are under way at once: a round trip is worth more than they are."""
_MOST_PAGES = 512
_HEAD_NBYTES = 4
"""No reply is shorter."""
_MISS = b"$-1\r"
_END = b"\r\n"
_LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True)
class PageRequest:
    """How one page is stored: listed, set and listed again.

    Listed before, so that a page whose writer dies is in its index; and again, because what removes
    pages from the index may have come in between.
    """

    key: bytes
    nbytes: int
    options: tuple[bytes, ...] = ()
    """Of SET, after the page."""
    listing: tuple[bytes, ...] = ()
    """The command that lists it; empty: it is listed."""

    def around(self) -> tuple[bytes, bytes]:
        """What goes before the page's bytes, and what follows them."""
        listed = _packed(self.listing)
        before = b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            *(listed, 3 + len(self.options), len(self.key), self.key, self.nbytes),
        )
        return before, b"\r\n%b%b" % (b"".join(map(_argument, self.options)), listed)

    @property
    def verdict_at(self) -> int:
        """Which of its replies is about the page."""
        return 1 if self.listing else 0

    @property
    def replies(self) -> int:
        return 3 if self.listing else 1


def _packed(command: tuple[bytes, ...]) -> bytes:
    if not command:
        return b""
    return b"*%d\r\n%b" % (len(command), b"".join(map(_argument, command)))


def _argument(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def window_of(depth: int, page_nbytes: int) -> int:
    """How many pages of a size are under way at once."""
    return max(depth, min(_MOST_PAGES, WINDOW_NBYTES // page_nbytes))


# --- get -----------------------------------------------------------------------------------------


def get_pages(
    wire: Wire, keys: Sequence[bytes], pages: Sequence[Page], window: int, settle: Settle
) -> None:
    """Read each page. It settles as True, as False (it is not there, or is no page), or as an error.

    Raises:
        WrongReply: A reply of another length or kind. What lies there under the key of a wrong length
            has settled as False; pages after it have not settled.
        OSError: The connection failed; pages have settled or not.
    """
    requests = [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys]
    reader = _Reader(wire)
    sent = 0
    for index, page in enumerate(pages):
        if sent < len(keys) and sent - index <= window // 2:
            until = min(len(keys), index + window)
            wire.send_pieces([memoryview(b"".join(requests[sent:until]))])
            sent = until
        settle(index, reader.page(page, index, settle, more=index + 1 < sent))


class _Reader:
    """Replies to GET, each of a size that is known beforehand."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._head = memoryview(bytearray(_HEAD_NBYTES))
        self._end = memoryview(bytearray(len(_END)))
        self._missing = [self._head]
        """What has not come yet of the head of the next reply."""

    def page(self, page: Page, index: int, settle: Settle, *, more: bool) -> Reply:
        """The next reply. `more`: another one was asked for, so that its head may be read along."""
        self._wire.receive(self._missing)
        head = bytes(self._head)
        self._missing = [self._head]
        if head == _MISS:
            return self._miss(more=more)
        if head[:1] == b"-":
            return ErrorReply.of_line((head[1:] + self._line()).decode(errors="replace"))
        header = b"$%d\r\n" % page.nbytes
        if header[:_HEAD_NBYTES] == head:
            rest = memoryview(bytearray(len(header) - _HEAD_NBYTES))
            pieces = [*([rest] if rest else []), *page.segments, self._end]
            left = self._wire.receive(
                [*pieces, *([self._head] if more else [])], least=len(rest), eager=True
            )
            if header[_HEAD_NBYTES:] == bytes(rest):
                self._finish(left, more=more)
                if bytes(self._end) == _END:
                    return True
        if head[:1] == b"$":
            settle(index, False)
        raise WrongReply("a page has another length, or its reply another form")

    def _miss(self, *, more: bool) -> bool:
        self._finish([self._end[:1], *([self._head] if more else [])], more=more)
        if bytes(self._end[:1]) != _END[1:]:
            raise WrongReply("a reply has another form")
        return False

    def _finish(self, pieces: list[memoryview], *, more: bool) -> None:
        """Receive the rest of a reply, and what has come of the next one's head along with it."""
        nbytes = sum(map(len, pieces))
        left = self._wire.receive(pieces, least=nbytes - (_HEAD_NBYTES if more else 0))
        if more:
            self._missing = left

    def _line(self) -> bytes:
        """The rest of a line, byte by byte: what follows it is no business of this reply."""
        line = bytearray()
        byte = memoryview(bytearray(1))
        while not line.endswith(_END):
            if len(line) > _LONGEST_LINE:
                raise WrongReply("an error is too long")
            self._wire.receive([byte])
            line += byte
        return bytes(line[: -len(_END)])


# --- set -----------------------------------------------------------------------------------------


def set_pages(
    wire: Wire, requests: Sequence[PageRequest], pages: Sequence[Page], window: int, settle: Settle
) -> None:
    """Store each page. It settles as the list of its replies: True (set), None (the key is taken)...

    Raises:
        WrongReply: A reply of another kind.
        OSError: The connection failed; what has not settled may or may not be carried out.
    """
    lines = _Lines(wire)
    sent = 0
    for index, request in enumerate(requests):
        if sent < len(requests) and sent - index <= window // 2:
            until = min(len(requests), index + window)
            wire.send_pieces(_pieces(requests[sent:until], pages[sent:until]))
            sent = until
        settle(index, [_reply(lines.read()) for _ in range(request.replies)])
    lines.must_be_done()


def _pieces(requests: Sequence[PageRequest], pages: Sequence[Page]) -> list[memoryview]:
    pieces: list[memoryview] = []
    between = b""
    for request, page in zip(requests, pages, strict=True):
        before, after = request.around()
        pieces.append(memoryview(between + before))
        pieces += page.segments
        between = after
    pieces.append(memoryview(between))
    return pieces


def _reply(line: bytes) -> Reply:
    if line == b"+OK":
        return True
    if line == b"$-1":
        return None
    if line[:1] == b"-":
        return ErrorReply.of_line(line[1:].decode(errors="replace"))
    if line[:1] == b":" and line[1:].isdigit():
        return int(line[1:])
    raise WrongReply("a reply has another form")


class _Lines:
    """Replies of one line each: there are no others to SET and ZADD."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lines: list[bytes] = []
        self._unfinished = b""

    def read(self) -> bytes:
        while not self._lines:
            if len(self._unfinished) > _LONGEST_LINE:
                raise WrongReply("a reply is too long")
            came = self._wire.recv(1 << 16)
            if not came:
                raise ConnectionResetError("the server ended the connection")
            *lines, self._unfinished = (self._unfinished + came).split(_END)
            self._lines = lines[::-1]
        return self._lines.pop()

    def must_be_done(self) -> None:
        if self._lines or self._unfinished:
            raise WrongReply("the server sent more replies than requests came")
