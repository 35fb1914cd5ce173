"""HTTP replies of `s3`: a reply that the compiled data plane accepts, Python reads the same way."""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from itertools import pairwise

from data_planes import compiled
from fuzz.choices import Choices
from fuzz.scratch import peer_of
from hicache_backends.s3.replies import SCRATCH_NBYTES, Malformed, ReplyReader

from hicache_storage.native import FILLED, HEAD_NBYTES, RECEIVED, STATE_COUNT, VERDICT

_SLOT_NBYTES = 512
_SIZES = (0, 1, 20, 700)
_STEPS = (256, 1, 7, 40, 4096, 3, 600, 256)
"""How many bytes of the replies arrive at once."""
_WAIT_S = 5.0
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"

SEEDS = (
    b"",
    *(bytes([n, 1, 2, 0]) + _HEAD % size + b"x" * size for n, size in enumerate(_SIZES)),
    *(
        bytes([n, 1, 0, 0]) + text
        for n in (0, 2)
        for text in (
            b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n<Code>x</",
            b"HTTP/1.1 204 No Content\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy",
        )
    ),
)
TOKENS = (
    *(
        b"\r\n",
        b"\r\n\r\n",
        b"HTTP/1.1 ",
        b"200",
        b"304",
        b"100",
        b"Content-Length: ",
        b"keep-alive",
    ),
    *(b"Transfer-Encoding: ", b"chunked", b"Connection: ", b"close", b"0\r\n\r\n", b": ", b"\t"),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    nbytes, has_body = choices.pick(_SIZES), choices.flag()
    split, step = choices.integer(0, 3), choices.pick(_STEPS)
    replies = choices.rest()
    reader, into = _reader(nbytes, split, has_body=has_body)
    is_refused = _feed(reader, replies, step)
    reply = reader.reply
    if reply is not None:
        assert 200 <= reply.status < 600
        assert not reply.is_page_filled or (reply.status == 200 and has_body and nbytes)
        assert not reply.is_page_filled or bytes(into) in replies
    if compiled is None:
        return
    status, body, page = _exchanged(replies, nbytes, split, has_body=has_body)
    if status < 200:
        return  # the reply is not plain: Python alone judges it

    assert reply is not None
    assert not is_refused
    assert (status, body) == (reply.status, b"" if reply.is_page_filled else reply.body)
    assert page == (bytes(into) if reply.is_page_filled else b"")
    head_nbytes = len(reply.head) + len(b"\r\n\r\n")
    if len(replies) == head_nbytes + len(page or reply.body):
        assert reader.reusable


def _exchanged(
    replies: bytes, nbytes: int, split: int, *, has_body: bool
) -> tuple[int, bytes, bytes]:
    """Return the verdict of the compiled data plane, and the body and the page of a whole reply."""
    slot, states, page = bytearray(_SLOT_NBYTES), array("q", [0, 0, 0, 0, 0, 0]), bytearray(nbytes)
    request = b"GET / HTTP/1.1\r\n\r\n" if has_body else b"HEAD / HTTP/1.1\r\n\r\n"
    assert len(states) == STATE_COUNT
    with peer_of(replies) as near:
        near.setblocking(False)
        # The reply may be there before the request is sent, which stops an exchange.
        states[2] = len(request)
        failed = compiled.run_exchanges(
            [near.fileno()], [[request]], [_pieces(page, split)], slot, states,
            time.monotonic() + _WAIT_S,
        )  # fmt: skip
    assert failed == 0
    assert states[VERDICT] != 0, "the reply has ended, so there is a verdict"
    if states[VERDICT] < 200:
        return states[VERDICT], b"", b""
    is_page = states[FILLED] == nbytes and bool(nbytes)
    body = b"" if is_page else bytes(slot[states[HEAD_NBYTES] : states[RECEIVED]])
    return states[VERDICT], body, bytes(page) if is_page else b""


def _pieces(page: bytearray, split: int) -> list[memoryview]:
    view = memoryview(page)
    cuts = (0, min(split, len(page)), len(page))
    return [view[start:end] for start, end in pairwise(cuts) if end > start]


def _reader(nbytes: int, split: int, *, has_body: bool) -> tuple[ReplyReader, bytearray]:
    into = bytearray(nbytes)
    reader = ReplyReader(
        bytearray(SCRATCH_NBYTES), has_body=has_body, into=_pieces(into, split), into_nbytes=nbytes
    )
    return reader, into


def _feed(reader: ReplyReader, replies: bytes, step: int) -> bool:
    """Receive `replies` in parts, then the end of the connection. Return True if they are refused."""
    at = 0
    try:
        while at < len(replies) and reader.reply is None:
            view = reader.buffers()[0]
            size = min(step, len(view), len(replies) - at)
            assert size > 0
            view[:size] = replies[at : at + size]
            reader.received(size)
            at += size
        if reader.reply is None:
            with suppress(ConnectionResetError):
                reader.received(0)
    except Malformed:
        assert reader.reply is None
        return True
    return False
