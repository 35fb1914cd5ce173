"""Answers of an S3 server: a get is True only for a page with its checksum, and no header raises."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from fuzz.choices import Choices
from fuzz.targets.http_replies import _feed, _reader
from hicache_backends.s3.client import Answer
from hicache_backends.s3.losses import CallFailed
from hicache_backends.s3.page_calls import PageCalls, _crc32
from hicache_backends.s3.replies import Reply
from hicache_backends.s3.settings import S3Settings

from hicache_storage.backend_support.counters import Counters
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page import Page

_NBYTES = 20
_PAGE = bytes(range(65, 65 + _NBYTES))
_CHECKSUM = _crc32(Page(_PAGE)).encode()
_OK = b"HTTP/1.1 200 OK\r\n"

SEEDS = (
    b"",
    *(
        bytes([n, 1]) + text
        for n in range(5)
        for text in (
            _OK + b"Content-Length: 20\r\nx-amz-checksum-crc32: " + _CHECKSUM + b"\r\n\r\n" + _PAGE,
            _OK + b"Content-Length: 20\r\nLast-Modified: Mon, 20 Nov 1995 19:12:08 GMT\r\n\r\n",
            _OK + b"Last-Modified: Mon, 20 Nov 1995 19:12:08 -0500\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 404 No\r\nContent-Length: 27\r\n\r\n<Code>NoSuchBucket</Code>xx",
        )
    ),
)
TOKENS = (
    *(_CHECKSUM, b"Content-Length: ", b"Last-Modified: ", b"x-amz-checksum-crc32: ", b"\r\n"),
    *(b"Mon, 20 Nov 1995 ", b" -0500", b" +99999999999", b"99999999999", b"19:12:08", b"GMT"),
    *(b"<Code>", b"NoSuchKey", b"</Code>", b"404", b"412", b"501", b"507", b"200"),
)


class _Client:
    """The client of the calls, which gets one reply to every request."""

    def __init__(self, reply: Reply) -> None:
        self.counters = Counters()
        self._reply = reply

    def object_request(self, *_: object, **__: object) -> None:
        raise NotImplementedError

    def refusal(self, reply: Reply) -> CallFailed:
        return CallFailed(StorageUnavailable(f"the store answers {reply.status} {reply.code}"))

    def send(self, _make: Callable[[], Any]) -> Generator[None, None, Any]:
        yield
        return Answer(self._reply, in_doubt=False)


def check(data: bytes) -> None:
    choices = Choices(data)
    operation, has_checksums = choices.integer(0, 4), choices.flag()
    replies = choices.rest()
    reader, into = _reader(_NBYTES if operation == 0 else 0, 3, has_body=operation in (0, 1, 3))
    if _feed(reader, replies, 256) or reader.reply is None:
        return
    reply = reader.reply
    settings = S3Settings(bucket="abc", checksum="crc32" if has_checksums else "none")
    client: Any = _Client(reply)
    calls = PageCalls(client, settings)
    page = Page(into) if operation == 0 else Page(_PAGE)
    made: dict[int, Callable[[], Generator[Any, Any, Any]]] = {
        0: lambda: calls.get("name", page),
        1: lambda: calls.read("name"),
        2: lambda: calls.exists("name", _NBYTES),
        3: lambda: calls.set("name", page),
        4: lambda: calls.written_at_s("name"),
    }
    result = _result(made[operation]())
    if operation == 0 and result is True:
        assert (200, True) == (reply.status, reply.is_page_filled)
        stated = reply.headers.get("x-amz-checksum-crc32")
        assert not has_checksums or stated in (None, _crc32(Page(into)))
    if operation == 2 and result is True:
        assert (200, _NBYTES) == (reply.status, reply.content_length)
    assert operation != 4 or result is None or isinstance(result, float)


def _result(call: Generator[Any, Any, Any]) -> Any:
    """Return the result of a call, or None if it fails as documented."""
    try:
        while True:
            next(call)
    except StopIteration as end:
        return end.value
    except CallFailed:
        return None
