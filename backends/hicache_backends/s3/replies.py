"""Parse HTTP/1.1 replies as they arrive. The bytes of a page go directly into the page.

The parser is strict: a reply whose end is uncertain is an error, and its connection is not used
again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.revocable import within_access

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.page import Revocable

_STATUS_LINE = re.compile(r"HTTP/1\.(?P<minor>[01]) (?P<status>[1-5][0-9]{2})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,15}")
_CHUNK = re.compile(rb"(?P<size>[0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
SCRATCH_NBYTES = 16 << 10
"""The largest head that a reply may have."""
_BODY_LIMIT = 16 << 20
_INTERIM_LIMIT = 256 << 10
_END_OF_HEAD = b"\r\n\r\n"


class Malformed(Exception):
    """The received bytes are not an acceptable reply."""


class Truncated(Malformed):
    """The connection ended in the middle of a reply."""


@dataclass(slots=True)
class Reply:
    """A server's reply."""

    status: int
    head: bytes
    """The head without its blank line."""
    body: bytes = b""
    """The body, unless it went into a page."""
    is_page_filled: bool = False
    """True if the body has filled the given page exactly."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers, by lower-case name. Each use parses them again."""
        return _parsed(self.head)[1]

    @property
    def code(self) -> str:
        """The name of S3's error, or "" if the body has none."""
        found = _CODE.search(self.body)
        return found[1].decode() if found else ""

    @property
    def content_length(self) -> int | None:
        """The announced length of the body. In the reply to a HEAD, it is the object's size."""
        text = self.headers.get("content-length", "")
        return int(text) if _LENGTH.fullmatch(text) else None


class ReplyReader:
    """A parser of one reply, from received bytes.

    The owner of the socket fills some of `buffers`, and reports the number of bytes with
    `received`, until `reply` is set. `scratch` receives heads and small bodies; it outlives the
    reader.
    """

    __slots__ = (
        "_body",
        "_body_left",
        "_decoded",
        "_has_body",
        "_head",
        "_interim_nbytes",
        "_into",
        "_into_nbytes",
        "_is_chunked",
        "_revocable",
        "_scratch",
        "_used",
        "_views",
        "has_begun",
        "reply",
        "reusable",
    )

    def __init__(
        self,
        scratch: bytearray,
        *,
        has_body: bool,
        into: Sequence[memoryview],
        into_nbytes: int,
        revocable: Revocable | None = None,
    ) -> None:
        self.reply: Reply | None = None
        self.reusable = False
        """True if this reply has ended cleanly, so that the connection can carry another request."""
        self.has_begun = False
        """True once a byte has arrived."""
        self._scratch = scratch
        self._has_body = has_body
        self._into = into
        self._into_nbytes = into_nbytes
        self._revocable = revocable
        self._used = 0
        self._head: Reply | None = None
        self._views: list[memoryview] = []
        self._interim_nbytes = 0
        self._body = bytearray()
        self._decoded = bytearray()
        """The chunks of the body that were decoded so far."""
        self._body_left: int | None = None
        self._is_chunked = False

    def buffers(self) -> list[memoryview]:
        """Return the memory for the next bytes. It is empty only after the end of the reply."""
        return self._views or [memoryview(self._scratch)[self._used :]]

    @property
    def fills_page(self) -> bool:
        """True if `buffers` are memory of the page."""
        return bool(self._views)

    def received(self, nbytes: int) -> None:
        """Parse `nbytes` that were received into `buffers`. 0 means the end of the connection.

        Raises:
            Malformed: The bytes can't become a reply.
            RevokedError: The memory of the page was revoked.
            ConnectionResetError: The connection ended before its first byte.
        """
        if not nbytes:
            self._end_of_connection()
            return
        self.has_begun = True
        if self._views:
            self._take_page(nbytes)
        elif self._head is None:
            self._used += nbytes
            self._take_head()
        else:
            self._take_body(memoryview(self._scratch)[:nbytes])

    def _take_head(self) -> None:
        """Parse the heads that have arrived. The first head that is not interim (1xx) is the reply's."""
        while (end := self._end_of_head()) >= 0:
            text = bytes(self._scratch[: end - len(_END_OF_HEAD)])
            status, headers = _parsed(text)
            rest = bytes(self._scratch[end : self._used])
            if status >= 200:
                self._used = 0
                self._begin_body(Reply(status, text), headers, rest)
                return
            self._interim_nbytes += end
            if self._interim_nbytes > _INTERIM_LIMIT:
                raise Malformed("the server sent only interim replies")
            self._scratch[: len(rest)] = rest
            self._used = len(rest)
        if self._used == len(self._scratch):
            raise Malformed("the head of a reply is too long")

    def _begin_body(self, head: Reply, headers: Mapping[str, str], rest: bytes) -> None:
        """Begin the body with the bytes that came with the head."""
        self._head = head
        self._frame(head, headers)
        if self.reply is None and self._views:
            data = memoryview(rest)
            if self._revocable is None:
                self._fill_page(data)
            else:
                within_access(self._revocable, self._fill_page, data)
        elif self.reply is None:
            self._take_body(memoryview(rest))
        elif rest:
            self.reusable = False

    def _end_of_head(self) -> int:
        """Return the end of the head, or -1 if it is incomplete."""
        found = self._scratch.find(_END_OF_HEAD, 0, self._used)
        return found + len(_END_OF_HEAD) if found >= 0 else -1

    def _frame(self, head: Reply, headers: Mapping[str, str]) -> None:
        """Determine the length of the body and where it goes."""
        self.reusable = headers.get("connection", "").lower() != "close"
        encoding = headers.get("transfer-encoding")
        length = headers.get("content-length")
        if not self._has_body or head.status in (204, 304):
            self._finish()
            return
        if encoding is not None and (encoding.lower() != "chunked" or length is not None):
            raise Malformed("a reply has an encoding that this client does not take")
        if length is not None and not _LENGTH.fullmatch(length):
            raise Malformed("the length of a reply is not a number")
        self._body_left = None if length is None else int(length)
        self._is_chunked = encoding is not None
        if head.status == 200 and self._into_nbytes:
            if self._body_left == self._into_nbytes:
                self._views = list(self._into)
            else:  # the body is not this page; left unread, it makes the connection unusable
                self._finish(reusable=False)
        elif self._body_left == 0:
            self._finish()

    def _fill_page(self, data: memoryview) -> int:
        """Copy the bytes that came with the head into the page. Return how many they were."""
        rest = data
        while rest and self._views:
            view = self._views[0]
            step = min(len(rest), len(view))
            view[:step] = rest[:step]
            rest = rest[step:]
            self._take_page(step)
        if rest:
            self.reusable = False
        return len(data)

    def _take_page(self, nbytes: int) -> None:
        views, done = self._views, 0
        while done < len(views) and nbytes >= len(views[done]):
            nbytes -= len(views[done])
            done += 1
        del views[:done]
        if nbytes:
            views[0] = views[0][nbytes:]
        if not views:
            assert self._head is not None
            self._head.is_page_filled = True
            self._finish()

    def _take_body(self, data: memoryview) -> None:
        self._body += data
        if len(self._body) + len(self._decoded) > _BODY_LIMIT:
            raise Malformed("the body of a reply is too long")
        if self._is_chunked:
            self._unchunk()
        elif self._body_left is not None and len(self._body) >= self._body_left:
            if len(self._body) > self._body_left:
                self.reusable = False
                del self._body[self._body_left :]
            self._finish()

    def _unchunk(self) -> None:
        """Move complete chunks to `_decoded`. The last chunk, without trailers, finishes the reply."""
        at = 0
        while (size_line := _CHUNK.match(self._body, at)) is not None:
            start = size_line.end()
            size = int(size_line["size"], 16)
            end = start + size
            if len(self._body) < end + 2:
                break
            if not self._body.startswith(b"\r\n", end):
                raise Malformed("the chunks of a reply do not fit together")
            if not size:
                self.reusable = self.reusable and len(self._body) == end + 2
                self._body = self._decoded
                self._finish()
                return
            self._decoded += self._body[start:end]
            at = end + 2
        else:
            if len(self._body) > at + 64:
                raise Malformed("the chunks of a reply have no sizes")
        del self._body[:at]

    def _end_of_connection(self) -> None:
        if not self.has_begun:
            raise ConnectionResetError("the server closed the connection")
        if self._head is None or self._views or self._is_chunked or self._body_left is not None:
            raise Truncated("the connection ended before the reply did")
        self._finish(reusable=False)

    def _finish(self, *, reusable: bool = True) -> None:
        assert self._head is not None
        self.reusable = self.reusable and reusable
        self._head.body = bytes(self._body)
        self.reply = self._head


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    match = _STATUS_LINE.fullmatch(status_line)
    if match is None:
        raise Malformed("the received bytes do not begin like a reply")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or not name or name != name.strip():
            raise Malformed("a reply has a malformed header")
        if headers.setdefault(name, value) != value and name in _FRAMING:
            raise Malformed(f"a reply has two different headers {name}")
    if match["minor"] == "0":
        headers.setdefault("connection", "close")
    return int(match["status"]), headers


_FRAMING = ("content-length", "transfer-encoding", "connection")
