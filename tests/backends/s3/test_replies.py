"""Replies are read whole, into the page or not at all, however the bytes are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hicache_backends.s3.replies import SCRATCH_NBYTES, Malformed, Reply, ReplyReader, Truncated
from hypothesis import given, settings
from hypothesis import strategies as st

DATA = bytes(range(256)) * 8


def reader_of(target: bytearray | None = None, *, has_body: bool = True) -> ReplyReader:
    """Return a reader for a page in three segments, or for no page."""
    view = memoryview(target or b"")
    cuts = (0, 1, len(view) // 2, len(view))
    into = [view[start:end] for start, end in pairwise(cuts)] if target else []
    return ReplyReader(
        bytearray(SCRATCH_NBYTES), has_body=has_body, into=into, into_nbytes=len(view)
    )


def feed(reader: ReplyReader, data: bytes, step: int = 1 << 20) -> int:
    """Pass `data` to the reader as a socket would. Return how many bytes the reader accepted."""
    at = 0
    while at < len(data) and reader.reply is None:
        buffers = reader.buffers()[0]
        size = min(step, len(buffers), len(data) - at)
        buffers[:size] = data[at : at + size]
        reader.received(size)
        at += size
    return at


def read(data: bytes, *, has_body: bool = True) -> Reply:
    reader = reader_of(has_body=has_body)
    feed(reader, data)
    assert reader.reply is not None
    return reader.reply


def page_reply(data: bytes = DATA) -> bytes:
    return b"HTTP/1.1 200 OK\r\nETag: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data


@settings(deadline=None)  # The machine may be busy.
@given(step=st.integers(1, 3000))
def test_a_page_lands_in_its_segments_however_it_comes(step: int) -> None:
    target = bytearray(len(DATA))
    reader = reader_of(target)

    feed(reader, page_reply(), step)

    assert reader.reply is not None
    assert (True, True) == (reader.reply.is_page_filled, reader.reusable)
    assert DATA == bytes(target)


def test_a_page_may_be_larger_than_the_scratch() -> None:
    data = DATA * 20
    target = bytearray(len(data))
    reader = reader_of(target)

    feed(reader, page_reply(data))

    assert data == bytes(target)


@pytest.mark.parametrize("nbytes", [len(DATA) - 1, len(DATA) + 1, 0])
def test_another_length_leaves_the_page_as_it_was(nbytes: int) -> None:
    target = bytearray(b"\xa5" * len(DATA))
    reader = reader_of(target)

    feed(reader, page_reply(bytes(nbytes)))

    assert reader.reply is not None
    assert (False, False) == (reader.reply.is_page_filled, reader.reusable)
    assert b"\xa5" * len(DATA) == bytes(target)


def test_bytes_beyond_the_page_end_the_connection() -> None:
    target = bytearray(len(DATA))
    reader = reader_of(target)

    feed(reader, page_reply() + b"HTTP/1.1 200 OK\r\n")

    assert not reader.reusable


@settings(deadline=None)  # The machine may be busy.
@given(step=st.integers(1, 100))
def test_chunks_are_put_together(step: int) -> None:
    reader = reader_of()

    feed(
        reader,
        b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\n<Code\r\n16;x=y\r\n>NoSuchKey</Code></Err\r\n0\r\n\r\n",
        step,
    )

    assert reader.reply is not None
    assert ("NoSuchKey", True) == (reader.reply.code, reader.reusable)


def test_a_head_has_a_length_and_no_body() -> None:
    reader = reader_of(has_body=False)

    feed(reader, b"HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n")

    assert reader.reply is not None
    assert (4096, b"", True) == (
        reader.reply.content_length,
        reader.reply.body,
        reader.reusable,
    )


def test_an_interim_reply_is_passed_over() -> None:
    assert read(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n").status == 204


def test_a_body_may_last_until_the_end() -> None:
    reader = reader_of()
    feed(reader, b"HTTP/1.0 503 Slow Down\r\n\r\n<Code>SlowDown</Code>")
    reader.received(0)

    assert reader.reply is not None
    assert ("SlowDown", False) == (reader.reply.code, reader.reusable)


@pytest.mark.parametrize(
    "closing", [b"HTTP/1.1 204 No Content\r\nConnection: Close\r\n\r\n", b"HTTP/1.0 204 No\r\n\r\n"]
)
def test_a_closing_server_ends_the_connection(closing: bytes) -> None:
    reader = reader_of()

    feed(reader, closing)

    assert reader.reply is not None
    assert not reader.reusable


@pytest.mark.parametrize(
    "wrong",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcde",
        b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n" + b"z" * 100,
        b"x" * SCRATCH_NBYTES,
    ],
)
def test_a_malformed_reply_is_refused(wrong: bytes) -> None:
    with pytest.raises(Malformed):
        read(wrong)


@pytest.mark.parametrize("kept", [1, 20, 60, 500])
def test_an_end_in_the_middle_raises(kept: int) -> None:
    reader = reader_of(bytearray(len(DATA)))
    feed(reader, page_reply()[:kept])

    with pytest.raises(Truncated):
        reader.received(0)


def test_the_end_before_anything_is_a_reset() -> None:
    with pytest.raises(ConnectionResetError):
        reader_of().received(0)


def test_an_error_has_a_name_only_if_it_looks_like_one() -> None:
    assert read(b"HTTP/1.1 403 No\r\nContent-Length: 21\r\n\r\n<Code>../secret</Code>").code == ""


def test_interim_replies_are_passed_over_however_many_come_at_once() -> None:
    reader = reader_of()

    feed(reader, b"HTTP/1.1 100\r\n\r\n" * 1000 + b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")

    assert reader.reply is not None
    assert (404, True) == (reader.reply.status, reader.reusable)


def test_a_server_that_sends_nothing_but_interim_replies_is_malformed() -> None:
    with pytest.raises(Malformed, match="only interim replies"):
        feed(reader_of(), b"HTTP/1.1 102 Processing\r\n\r\n" * 100_000)


def test_small_chunks_take_time_in_proportion_to_their_number() -> None:
    """The reader examines every byte a few times, and not once for each later packet."""
    body = b"1\r\nx\r\n" * 100_000
    reader = reader_of()

    feed(reader, b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n", 1 << 10)
    feed(reader, body, 1 << 10)

    assert len(reader._body) < 1 << 10  # decoded bytes are not parsed again
    feed(reader, b"0\r\n\r\n")
    assert reader.reply is not None
    assert b"x" * 100_000 == reader.reply.body
