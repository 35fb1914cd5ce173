"""HTTP exchanges of the compiled data plane, whose verdicts must agree with Python's parser."""

from __future__ import annotations

import errno
import socket
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from data_planes import NEEDS_COMPILED, compiled
from hicache_backends.s3.replies import SCRATCH_NBYTES, Malformed, ReplyReader
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import (
    FILLED,
    HIT,
    LANE,
    MISS,
    NO_BULK,
    RECEIVED,
    SENT,
    STALE,
    STATE_COUNT,
    STOPPED,
    VERDICT,
    WRONG,
)

pytestmark = NEEDS_COMPILED

SOON_S = 30.0
SLOT_NBYTES = 512
GET = b"GET /p HTTP/1.1\r\n\r\n"
PAGE = bytes(range(256)) * 4
OK = b"HTTP/1.1 200 OK\r\n"


def soon() -> float:
    return time.monotonic() + SOON_S


@dataclass
class Batch:
    """The arguments of one call, some of which hold its results afterwards."""

    requests: Sequence[Sequence[bytes]]
    pages: Sequence[Sequence[bytearray]]
    lanes: int = 1
    slot_nbytes: int = SLOT_NBYTES

    def __post_init__(self) -> None:
        self.slots = bytearray(self.slot_nbytes * len(self.requests))
        self.states = array("q", [0, -1, 0, 0, 0, 0] * len(self.requests))
        for lane in range(min(self.lanes, len(self.requests))):
            self.states[lane * STATE_COUNT + LANE] = lane

    def run(self, fds: Sequence[int], until_s: float | None = None) -> int:
        until_s = soon() if until_s is None else until_s
        result: int = compiled.run_exchanges(
            fds, self.requests, self.pages, self.slots, self.states, until_s
        )
        return result

    def numbers(self, kind: int) -> list[int]:
        return list(self.states[kind::STATE_COUNT])

    def received(self, number: int) -> bytes:
        start = number * self.slot_nbytes
        return bytes(self.slots[start : start + self.numbers(RECEIVED)[number]])


def page_reply(page: bytes) -> bytes:
    return OK + b"Content-Length: %d\r\n\r\n%b" % (len(page), page)


def send_in_parts(connection: socket.socket, data: bytes, cuts: Sequence[int]) -> None:
    """Send `data` in parts, then the end of this direction."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        connection.sendall(data[start:end])
    connection.shutdown(socket.SHUT_WR)


def feed_reply(
    connection: socket.socket, request_nbytes: int, data: bytes, cuts: Sequence[int]
) -> None:
    receive(connection, request_nbytes)
    send_in_parts(connection, data, cuts)


def receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def answer(connection: socket.socket, replies: Sequence[bytes], request_nbytes: int) -> bytes:
    """Answer each request, all of which have one size. Return all requests."""
    requests = b""
    for reply in replies:
        request = receive(connection, request_nbytes)
        if not request:
            break
        requests += request
        connection.sendall(reply)
    return requests


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


statuses = st.sampled_from([b"200"] * 6 + [b"404", b"204", b"304", b"100", b"500", b"2x0", b"600"])
fields = st.sampled_from(
    [
        *[b"Content-Length: 30"] * 6,
        b"content-length:30 \t",
        b"Content-Length: 31",
        b"Content-Length: 0",
        b"Content-Length: +3",
        b"Content-Length: ",
        b"Content-Length: 1234567890123456",
        b"Connection: keep-alive",
        b"connection: Keep-Alive\t",
        b"Connection: close",
        b"Transfer-Encoding: chunked",
        b"ETag: \xe4\xff:;",
        b"Date : x",
        b": x",
        b"no colon",
        b"x: \x00",
        b"x: \r",
        b"x: a\nContent-Length: 4",
        b"",
    ]
)


def head_of(version: bytes, status: bytes, reason: bytes, lines: list[bytes]) -> bytes:
    return b"\r\n".join([version + status + reason, *lines])


heads = st.builds(
    head_of,
    st.sampled_from([b"HTTP/1.1 "] * 8 + [b"HTTP/1.0 ", b"HTTP/1.1", b"ICY "]),
    statuses,
    st.sampled_from([b" OK", b"", b" ", b"x", b" a\nb", b" \xff\t"]),
    st.lists(fields, max_size=4),
)
heads_or_noise = st.one_of(heads, heads, heads, st.binary(max_size=600))


@settings(max_examples=300, deadline=None)
@given(
    head=heads_or_noise,
    body=st.binary(max_size=40),
    method=st.sampled_from([b"GET", b"HEAD"]),
    has_page=st.booleans(),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
def test_verdicts_on_replies_are_those_of_the_parser_in_python(
    head: bytes,
    body: bytes,
    method: bytes,
    has_page: bool,  # noqa: FBT001
    cuts: list[int],
) -> None:
    data = head + b"\r\n\r\n" + body
    request = method + b" /p\r\n\r\n"
    page = [bytearray(b"\xa5" * 10), bytearray(b""), bytearray(b"\xa5" * 20)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        batch = Batch([[request]], [page if has_page else []])
        feeding = threading.Thread(target=feed_reply, args=(theirs, len(request), data, cuts))
        feeding.start()
        assert batch.run([ours.fileno()]) == 0
        feeding.join()
        rest = receive(ours, len(data))
    filled = b"".join(page)[: batch.numbers(FILLED)[0]]
    whole = batch.received(0)
    surplus = whole.partition(b"\r\n\r\n")[2] if filled else b""
    assert data == whole + filled[len(surplus) :] + rest
    if batch.numbers(VERDICT) == [STOPPED]:
        return

    into = [memoryview(bytearray(30))] if has_page else []
    reader = ReplyReader(
        bytearray(SCRATCH_NBYTES),
        has_body=method == b"GET",
        into=into,
        into_nbytes=30 if has_page else 0,
    )
    feed(reader, data)
    assert reader.reply is not None
    assert batch.numbers(VERDICT) == [reader.reply.status]
    assert batch.numbers(FILLED) == [30 if reader.reply.is_page_filled else 0]
    if reader.reply.is_page_filled:
        assert bytes(into[0]) == filled


def feed(reader: ReplyReader, data: bytes) -> None:
    at = 0
    while at < len(data) and reader.reply is None:
        buffer = reader.buffers()[0]
        step = min(len(buffer), len(data) - at)
        buffer[:step] = data[at : at + step]
        try:
            reader.received(step)
        except Malformed:
            pytest.fail("the data plane has taken what the parser refuses")
        at += step


def test_one_call_carries_many_requests_over_few_connections() -> None:
    requests = [[b"GET /%d\r\n\r\n" % number, b"x" * 50] for number in range(10, 30)]
    pages = [[bytearray(400), bytearray(624)] for _ in requests]
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(3)]
        for ours, theirs in pairs:
            stack.enter_context(ours)
            stack.enter_context(theirs)
        batch = Batch(requests, pages, lanes=3)
        request_nbytes = len(requests[0][0]) + 50
        servers = [
            threading.Thread(target=answer, args=(theirs, [page_reply(PAGE)] * 20, request_nbytes))
            for _, theirs in pairs
        ]
        for server in servers:
            server.start()
        assert batch.run([ours.fileno() for ours, _ in pairs]) == 0
        for ours, _ in pairs:
            ours.shutdown(socket.SHUT_RDWR)
        for server in servers:
            server.join(SOON_S)

    assert [200] * 20 == batch.numbers(VERDICT)
    assert [PAGE] * 20 == [b"".join(page) for page in pages]
    assert {0, 1, 2} >= set(batch.numbers(LANE))


def test_a_large_request_and_a_large_page_go_whole(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    body = PAGE * 4000
    pages = [[bytearray(len(body) // 2), bytearray(len(body) // 2)]]
    batch = Batch([[b"PUT /p\r\n\r\n", *[PAGE] * 4000]], pages)
    taken: list[bytes] = []

    def serve() -> None:
        taken.append(receive(theirs, 10 + len(body)))
        theirs.sendall(page_reply(body))

    server = threading.Thread(target=serve)
    server.start()
    assert batch.run([ours.fileno()]) == 0
    server.join()

    assert [200, 0, 10 + len(body)] == list(batch.states[:3])
    assert (taken[0][10:], b"".join(pages[0])) == (body, body)


def test_a_call_goes_on_where_the_last_one_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    page = bytearray(len(PAGE))
    batch = Batch([[GET]], [[page]])
    reply = page_reply(PAGE)
    for start, end in pairwise([0, 10, len(reply) - len(PAGE), len(reply) - 5, len(reply)]):
        assert batch.numbers(VERDICT) == [0]
        theirs.sendall(reply[start:end])
        ended = end == len(reply)
        if start == 0:  # a connection with bytes is not idle
            assert batch.run([ours.fileno()]) == 0
            assert batch.numbers(VERDICT) == [STALE]
            batch.states[VERDICT] = 0
            receive(ours, 10)
            batch.run([ours.fileno()], 0.0)
            theirs.sendall(reply[:10])
        assert batch.run([ours.fileno()], soon() if ended else time.monotonic() + 0.05) == 0

    assert [200, 0, len(GET)] == list(batch.states[:3])
    assert PAGE == bytes(page)
    assert GET == receive(theirs, len(GET))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_connection_takes_nothing_more_after_an_overload(
    status: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    batch = Batch([[GET]] * 3, [[], [], []])
    replies = [
        OK + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 %d No\r\nContent-Length: 1\r\n\r\nx" % status,
    ]
    server = threading.Thread(target=answer, args=(theirs, replies, len(GET)))
    server.start()
    assert batch.run([ours.fileno()]) == 0
    server.join()

    assert [200, status, 0] == batch.numbers(VERDICT)
    assert [0, 0, -1] == batch.numbers(LANE)
    assert [len(GET), len(GET), 0] == batch.numbers(SENT)


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n", id="the end is near"),
        pytest.param(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", id="chunks"),
        pytest.param(OK + b"\r\n", id="no length"),
        pytest.param(OK + b"Content-Length: 9\r\n\r\n", id="another length"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", id="interim"),
        pytest.param(
            b"HTTP/1.1 404 No\r\nContent-Length: 600\r\n\r\n", id="too large for the slot"
        ),
        pytest.param(b"x" * 600, id="no head"),
        pytest.param(b"HTTP/1.0 404 No\r\nContent-Length: 0\r\n\r\n", id="an old version"),
    ],
)
def test_an_odd_reply_stops_its_connection_alone(odd: bytes) -> None:
    first, second = socket.socketpair(), socket.socketpair()
    page = bytearray(b"\xa5" * len(PAGE))
    pages = [[page], *[[bytearray(len(PAGE))] for _ in range(4)]]
    with first[0], first[1], second[0], second[1]:
        batch = Batch([[GET]] * 5, pages, lanes=2)
        servers = [
            threading.Thread(target=answer, args=(first[1], [odd], len(GET))),
            threading.Thread(target=answer, args=(second[1], [page_reply(PAGE)] * 4, len(GET))),
        ]
        for server in servers:
            server.start()
        assert batch.run([first[0].fileno(), second[0].fileno()]) == 0
        for server in servers:
            server.join()
        rest = receive(first[0], len(odd) - len(batch.received(0)))

    assert [STOPPED, 200, 200, 200, 200] == batch.numbers(VERDICT)
    assert odd == batch.received(0) + rest
    assert b"\xa5" * len(PAGE) == bytes(page)


def test_a_connection_with_bytes_beyond_its_reply_takes_nothing_more(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    pages = [[bytearray(len(PAGE))] for _ in range(2)]
    batch = Batch([[GET]] * 2, pages)
    server = threading.Thread(target=answer, args=(theirs, [page_reply(PAGE) + b"x"], len(GET)))
    server.start()
    assert batch.run([ours.fileno()]) == 0
    server.join()

    assert [200, 0] == batch.numbers(VERDICT)
    assert [0, -1] == batch.numbers(LANE)
    assert PAGE == bytes(pages[0][0])


def test_a_reply_to_what_was_not_sent_stops(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    batch = Batch([[b"PUT /p\r\n\r\n", bytes(64 << 20)]], [[]])

    def serve() -> None:
        receive(theirs, 10)
        theirs.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")

    server = threading.Thread(target=serve)
    server.start()
    assert batch.run([ours.fileno()]) == 0
    server.join()

    assert [STOPPED] == batch.numbers(VERDICT)
    assert 0 < batch.numbers(SENT)[0] < 64 << 20
    assert b"" == batch.received(0)


def test_a_closed_peer_is_found_before_anything_is_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.close()
    batch = Batch([[GET]] * 2, [[], []])

    assert batch.run([ours.fileno()]) == 0
    assert [STALE, 0] == batch.numbers(VERDICT)
    assert [0, 0] == batch.numbers(SENT)


def test_a_reset_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

        def serve() -> None:
            receive(theirs, len(GET))
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            theirs.close()

        server = threading.Thread(target=serve)
        server.start()
        with ours:
            batch = Batch([[GET]], [[]])
            assert batch.run([ours.fileno()]) == 0
        server.join()

    assert [-errno.ECONNRESET] == batch.numbers(VERDICT)


def test_a_silent_server_ends_by_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    batch = Batch([[GET]] * 2, [[], []])
    began_s = time.monotonic()

    assert batch.run([ours.fileno()], began_s + 0.05) == 0
    assert 0.04 < time.monotonic() - began_s < SOON_S
    assert [0, 0, len(GET), 0, 0, 0] == list(batch.states[:STATE_COUNT])
    assert [0, -1] == batch.numbers(LANE)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(LANE, 1), (SENT, 1 << 20), (SENT, -1), (RECEIVED, SLOT_NBYTES + 1), (FILLED, 1), (4, 1)],
)
def test_numbers_that_do_not_fit_are_refused(
    kind: int, value: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    batch = Batch([[GET]], [[]])
    batch.states[kind] = value

    with pytest.raises(ValueError, match="do not fit together"):
        batch.run([pair[0].fileno()])


def test_lists_of_other_lengths_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    fds = [pair[0].fileno()]
    batch = Batch([[GET]], [[]])
    refused: list[tuple[Any, ...]] = [
        (fds, [[GET]], [], batch.slots, batch.states),
        (fds, [[GET], [GET]], [[], []], batch.slots, batch.states),
        (fds, [[GET]], [[]], bytearray(), batch.states),
        (fds, [[]], [[]], batch.slots, batch.states),
    ]
    for arguments in refused:
        with pytest.raises(ValueError, match="do not fit together"):
            compiled.run_exchanges(*arguments, soon())


def test_states_that_do_not_fit_are_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    batch = Batch([[GET]], [[]])
    for states in ([bytearray(8)] * 2, [bytearray(7)]):
        with pytest.raises(ValueError, match=r"do not fit together|8 aligned bytes"):
            compiled.run_exchanges(
                [pair[0].fileno()], [[GET]], [[]], batch.slots, batch.states, soon(), states
            )


def test_no_requests_take_no_time() -> None:
    assert compiled.run_exchanges([], [], [], bytearray(), array("q"), soon()) == 0


# RESP exchanges of the compiled data plane: bytes and verdicts.


def reply_of(kind: str, page: bytes) -> bytes:
    whole = b"$%d\r\n%b\r\n" % (len(page), page)
    return {
        "hit": whole,
        "miss": b"$-1\r\n",
        "error": b"-ERR no\r\n",
        "integer": b":1\r\n",
        "longer": b"$%d\r\n%bx\r\n" % (len(page) + 1, page),
        "unended": whole[:-1] + b"x",
        "null array": b"*-1\r\n",
        "cut": whole[: len(whole) // 2],
    }[kind]


GOES_ON = ("hit", "miss")
VERDICTS = {
    "hit": HIT,
    "miss": MISS,
    "error": NO_BULK,
    "integer": NO_BULK,
    "longer": WRONG,
    "unended": WRONG,
    "null array": NO_BULK,
    "cut": -errno.ECONNRESET,
}
kinds = st.sampled_from(
    ["hit"] * 6 + ["miss"] * 3 + ["error", "integer", "longer", "unended", "null array", "cut"]
)


@settings(max_examples=200, deadline=None)
@given(
    replies=st.lists(st.tuples(kinds, st.binary(max_size=300)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    begun=st.integers(0, 4),
    sent=st.integers(0, 6),
    window=st.integers(1, 7),
)
def test_each_reply_has_its_verdict(
    replies: list[tuple[str, bytes]], cuts: list[int], begun: int, sent: int, window: int
) -> None:
    cut_at = next((at for at, (kind, _) in enumerate(replies) if kind == "cut"), len(replies))
    # A server sends nothing after a reply that it cut, or the next reply could be taken for a page.
    data = b"".join(reply_of(kind, page) for kind, page in replies[: cut_at + 1])
    sent = min(sent, len(replies))
    begun = min(begun, len(data)) if sent else 0
    requests = [b"GET %d" % number for number in range(len(replies))]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        feeding = threading.Thread(target=send_in_parts, args=(theirs, data[begun:], cuts))
        feeding.start()
        memory = [
            [bytearray(len(page) // 2), bytearray(len(page) - len(page) // 2)]
            for _, page in replies
        ]
        verdicts, count, head = compiled.fetch_bulks(
            ours.fileno(), requests, sent, data[:begun], memory, window, soon()
        )
        feeding.join()
        left = ours.recv(1 << 20) if verdicts[-1] >= 0 else b""
        ours.close()
        asked = b"".join(iter(partial(theirs.recv, 1 << 20), b""))
    last = next((at for at, (kind, _) in enumerate(replies) if kind not in GOES_ON), len(replies))
    assert verdicts == [VERDICTS[kind] for kind, _ in replies[: last + 1]]
    assert b"".join(requests[sent:count]) == asked
    assert len(verdicts) <= count <= max(sent, len(verdicts) - 1 + window)
    for (kind, page), found in zip(replies[:last], memory, strict=False):
        assert kind == "miss" or page == b"".join(found)
    if verdicts[-1] in (HIT, MISS, NO_BULK):
        taken = sum(len(reply_of(kind, page)) for kind, page in replies[:last])
        assert data[taken:] == head + left


@pytest.mark.parametrize("kind", ["error", "integer", "longer", "unended", "cut"])
def test_the_first_reply_that_is_no_page_ends_the_call(
    kind: str, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    page = bytes(range(100))
    data = (
        reply_of("hit", page)
        + reply_of(kind, page)
        + (b"" if kind == "cut" else reply_of("hit", page))
    )
    send_in_parts(theirs, data, [])
    memory = [[bytearray(100)] for _ in range(3)]

    verdicts, _, _ = compiled.fetch_bulks(ours.fileno(), [b"GET"] * 3, 0, b"", memory, 2, soon())

    assert [HIT, VERDICTS[kind]] == verdicts
    assert page == bytes(memory[0][0])


def test_requests_are_sent_when_half_of_the_window_is_answered(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    memory = [[bytearray(1)] for _ in range(9)]
    arguments = (ours.fileno(), [b"?"] * 9, 0, b"", memory, 4, soon())
    reading = threading.Thread(target=compiled.fetch_bulks, args=arguments)
    reading.start()
    seen: list[bytes] = []
    for replies in (2, 2, 2, 3):
        seen.append(theirs.recv(99))
        theirs.sendall(b"$1\r\nx\r\n" * replies)
    reading.join(SOON_S)

    assert [b"????", b"??", b"??", b"?"] == seen


lines = st.sampled_from(
    [b"+OK", b":1", b"$-1", b"-ERR no", b"x", b"+" + b"y" * 4096, b"-" + b"z" * 5000, b""]
)


@settings(max_examples=200, deadline=None)
@given(
    replies=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    cuts=st.lists(st.integers(0, 9000), max_size=8),
    missing_nbytes=st.integers(0, 9),
    window=st.integers(1, 7),
)
def test_lines_have_the_verdict_of_a_simple_reader(
    replies: list[list[bytes]], cuts: list[int], missing_nbytes: int, window: int
) -> None:
    data = b"".join(line + b"\r\n" for reply in replies for line in reply)
    data = data[: max(0, len(data) - missing_nbytes)]
    requests = [[b"SET ", b"%d" % number, b"\r\n"] for number in range(len(replies))]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        feeding = threading.Thread(target=send_in_parts, args=(theirs, data, cuts))
        feeding.start()
        verdict, received, _ = compiled.exchange_lines(
            ours.fileno(), requests, list(map(len, replies)), window, soon()
        )
        feeding.join()

    assert verdict_on(data, sum(map(len, replies))) == verdict
    assert data == received if verdict == HIT else data.startswith(received)


def verdict_on(data: bytes, count: int) -> int:
    """Return the right verdict on `count` lines, by a simple reader."""
    for _ in range(count):
        line, newline, data = data.partition(b"\n")
        if (line or newline) and (line[:1] not in (b"+", b"-", b":", b"$") or len(line) > 4096):
            return WRONG
        if not newline:
            return -errno.ECONNRESET
    return HIT


@pytest.mark.parametrize(
    ("received", "verdict"),
    [
        (b"+OK\r\n:1\r\n", HIT),
        (b"+OK\r\n*1\r\n", WRONG),
        (b"+OK\r\n" + b"-" * 5000, WRONG),
        (b"+OK\r\n", -errno.ECONNRESET),
    ],
    ids=["plain", "an array", "too long", "cut"],
)
def test_received_bytes_are_returned_with_the_verdict(
    received: bytes, verdict: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    send_in_parts(theirs, received, [])

    assert (verdict, received, []) == compiled.exchange_lines(
        ours.fileno(), [[b"a"], [b"b"]], [1, 1], 1, soon()
    )


def test_arguments_that_do_not_fit_are_refused(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    fd = pair[0].fileno()
    for requests, sent, head, window in (
        ([b"?"], 0, b"", 0),
        ([b"?"], 2, b"", 1),
        ([b"?"], 0, b"$", 1),
        ([b"?"], 1, b"$1234", 1),
        ([b"?", b"?"], 0, b"", 1),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            compiled.fetch_bulks(fd, requests, sent, head, [[bytearray(1)]], window, soon())
    for replies, window in (([0], 1), ([1], 0), ([1, 1], 1), ([5000], 1)):
        with pytest.raises(ValueError, match="do not fit together"):
            compiled.exchange_lines(fd, [[b"?"]], replies, window, soon())


def test_a_silent_socket_ends_by_the_deadline(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    began_s = time.monotonic()

    assert ([-errno.ETIMEDOUT], 1, b"") == compiled.fetch_bulks(
        ours.fileno(), [b"GET"], 0, b"", [[bytearray(1)]], 1, began_s + 0.1
    )
    large = [[bytes(64 << 20)]]
    until_s = time.monotonic() + 0.05
    assert (-errno.ETIMEDOUT, b"", []) == compiled.exchange_lines(
        theirs.fileno(), large, [1], 1, until_s
    )
    assert time.monotonic() - began_s < SOON_S


def test_a_shutdown_ends_a_call_that_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = pair
    ended: list[Any] = []
    arguments = (ours.fileno(), [b"GET"], 0, b"", [[bytearray(1)]], 1, soon())
    waiting = threading.Thread(target=lambda: ended.append(compiled.fetch_bulks(*arguments)))
    waiting.start()
    ours.shutdown(socket.SHUT_RD)
    waiting.join(SOON_S)

    assert [([-errno.ECONNRESET], 1, b"")] == ended


def test_a_peer_that_is_gone_is_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.close()

    arguments = ([b"GET"], 0, b"", [[bytearray(1)]], 1, soon())
    assert [-errno.EPIPE] == compiled.fetch_bulks(ours.fileno(), *arguments)[0]
    lines = compiled.exchange_lines(ours.fileno(), [[b"SET"]], [1], 1, soon())
    assert (-errno.EPIPE, b"", []) == lines


def test_a_page_of_no_bytes_is_received(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.sendall(b"$0\r\n\r\n")

    assert ([HIT], 1, b"") == compiled.fetch_bulks(ours.fileno(), [b"GET"], 0, b"", [[]], 1, soon())
