"""RESP exchanges of the compiled data plane: bytes and verdicts."""

from __future__ import annotations

import errno
import socket
import threading
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from data_planes import NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, MISS, NO_BULK, WRONG

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = NEEDS_COMPILED

SOON_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def soon() -> float:
    return time.monotonic() + SOON_S


def send_in_parts(connection: socket.socket, data: bytes, cuts: list[int]) -> None:
    """Send `data` in parts, then end that direction."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        connection.sendall(data[start:end])
    connection.shutdown(socket.SHUT_WR)


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
    # A server sends nothing after a reply that it cut. Another reply could be taken for its page.
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
        verdict, received = compiled.exchange_lines(
            ours.fileno(), requests, list(map(len, replies)), window, soon()
        )
        feeding.join()

    assert verdict_on(data, sum(map(len, replies))) == verdict
    assert data == received if verdict == HIT else data.startswith(received)


def verdict_on(data: bytes, count: int) -> int:
    """Return the verdict on `count` lines, read the simple way."""
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

    assert (verdict, received) == compiled.exchange_lines(
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
    assert (-errno.ETIMEDOUT, b"") == compiled.exchange_lines(
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
    assert (-errno.EPIPE, b"") == compiled.exchange_lines(ours.fileno(), [[b"SET"]], [1], 1, soon())


def test_a_page_of_no_bytes_is_received(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    theirs.sendall(b"$0\r\n\r\n")

    assert ([HIT], 1, b"") == compiled.fetch_bulks(ours.fileno(), [b"GET"], 0, b"", [[]], 1, soon())
