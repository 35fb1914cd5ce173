"""Sockets of the data plane, compiled and in Python: the same bytes and the same verdicts."""

from __future__ import annotations

import errno
import socket
import threading
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage.native import HIT, MISS, NO_BULK, WRONG, reference

if TYPE_CHECKING:
    from collections.abc import Iterator

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


kinds = st.sampled_from(
    ["hit"] * 6 + ["miss"] * 3 + ["error", "integer", "longer", "unended", "null array", "cut"]
)


@NEEDS_COMPILED
@settings(max_examples=200, deadline=None)
@given(
    replies=st.lists(st.tuples(kinds, st.binary(max_size=300)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    begun=st.integers(0, 4),
    sent=st.integers(0, 6),
    window=st.integers(1, 7),
)
def test_replies_are_read_alike(
    replies: list[tuple[str, bytes]], cuts: list[int], begun: int, sent: int, window: int
) -> None:
    cut_at = next((at for at, (kind, _) in enumerate(replies) if kind == "cut"), len(replies))
    # A server sends nothing after a reply that it cut. Another reply could be taken for its page.
    data = b"".join(reply_of(kind, page) for kind, page in replies[: cut_at + 1])
    sent = min(sent, len(replies))
    begun = min(begun, len(data)) if sent else 0
    requests = [b"GET %d" % number for number in range(len(replies))]
    seen = list[Any]()
    for module in (reference, compiled):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            feeding = threading.Thread(target=send_in_parts, args=(theirs, data[begun:], cuts))
            feeding.start()
            memory = [
                [bytearray(len(page) // 2), bytearray(len(page) - len(page) // 2)]
                for _, page in replies
            ]
            verdicts, count, head = module.fetch_bulks(
                ours.fileno(), requests, sent, data[:begun], memory, window, soon()
            )
            feeding.join()
            left = ours.recv(1 << 20) if verdicts[-1] >= 0 else b""
            ours.close()
            asked = b"".join(iter(partial(theirs.recv, 1 << 20), b""))
        hits = [
            b"".join(page)
            for page, verdict in zip(memory, verdicts, strict=False)
            if verdict == HIT
        ]
        follows = head + left if verdicts[-1] in (HIT, MISS, NO_BULK) else b""
        seen.append((verdicts, hits, follows, count))
        assert b"".join(requests[sent:count]) == asked

    assert seen[0] == seen[1]
    tried = replies[: len(seen[0][0])]
    expected = [page for kind, page in tried if kind == "hit"]
    assert expected == seen[0][1]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("error", NO_BULK),
        ("integer", NO_BULK),
        ("longer", WRONG),
        ("unended", WRONG),
        ("cut", -errno.ECONNRESET),
    ],
)
def test_the_first_reply_that_is_no_page_ends_the_call(
    module: Any, kind: str, verdict: int, pair: tuple[socket.socket, socket.socket]
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

    verdicts, _, _ = module.fetch_bulks(ours.fileno(), [b"GET"] * 3, 0, b"", memory, 2, soon())

    assert [HIT, verdict] == verdicts
    assert page == bytes(memory[0][0])


@pytest.mark.parametrize("module", BOTH)
def test_requests_are_sent_when_half_of_the_window_is_answered(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    memory = [[bytearray(1)] for _ in range(9)]
    arguments = (ours.fileno(), [b"?"] * 9, 0, b"", memory, 4, soon())
    reading = threading.Thread(target=module.fetch_bulks, args=arguments)
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


@NEEDS_COMPILED
@settings(max_examples=200, deadline=None)
@given(
    replies=st.lists(st.lists(lines, min_size=1, max_size=3), max_size=6),
    cuts=st.lists(st.integers(0, 9000), max_size=8),
    missing_nbytes=st.integers(0, 9),
    window=st.integers(1, 7),
)
def test_lines_are_exchanged_alike(
    replies: list[list[bytes]], cuts: list[int], missing_nbytes: int, window: int
) -> None:
    data = b"".join(line + b"\r\n" for reply in replies for line in reply)
    data = data[: max(0, len(data) - missing_nbytes)]
    requests = [[b"SET ", b"%d" % number, b"\r\n"] for number in range(len(replies))]
    seen = list[Any]()
    for module in (reference, compiled):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            feeding = threading.Thread(target=send_in_parts, args=(theirs, data, cuts))
            feeding.start()
            verdict, received = module.exchange_lines(
                ours.fileno(), requests, list(map(len, replies)), window, soon()
            )
            feeding.join()
            assert data.startswith(received)
            seen.append((verdict, received if verdict == HIT else b""))

    assert seen[0] == seen[1]
    is_plain = all(line[:1] in (b"+", b"-", b":", b"$") for reply in replies for line in reply)
    if is_plain and not missing_nbytes and all(len(line) < 4096 for r in replies for line in r):
        assert (HIT, data) == seen[0]


@pytest.mark.parametrize("module", BOTH)
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
    module: Any, received: bytes, verdict: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    send_in_parts(theirs, received, [])

    assert (verdict, received) == module.exchange_lines(
        ours.fileno(), [[b"a"], [b"b"]], [1, 1], 1, soon()
    )


@pytest.mark.parametrize("module", BOTH)
def test_arguments_that_do_not_fit_are_refused(
    module: Any, pair: tuple[socket.socket, socket.socket]
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
            module.fetch_bulks(fd, requests, sent, head, [[bytearray(1)]], window, soon())
    for replies, window in (([0], 1), ([1], 0), ([1, 1], 1), ([5000], 1)):
        with pytest.raises(ValueError, match="do not fit together"):
            module.exchange_lines(fd, [[b"?"]], replies, window, soon())


@pytest.mark.parametrize("module", BOTH)
def test_pieces_arrive_whole(module: Any, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    pieces = [bytes([number % 256]) * (number * 37 % 5000) for number in range(1500)]
    target = [bytearray(len(piece)) for piece in pieces]
    nbytes = sum(map(len, pieces))
    sending = threading.Thread(target=lambda: module.send_pieces(theirs.fileno(), pieces, soon()))
    sending.start()

    assert nbytes == module.receive_pieces(ours.fileno(), target, nbytes, soon())
    sending.join()
    assert pieces == [bytes(piece) for piece in target]


@pytest.mark.parametrize("module", BOTH)
def test_no_more_than_is_wanted_is_awaited(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    theirs.sendall(b"12345")
    target = [bytearray(3), bytearray(10)]

    assert 5 == module.receive_pieces(ours.fileno(), target, 2, soon())
    assert b"12345" == bytes(target[0] + target[1][:2])


@pytest.mark.parametrize("module", BOTH)
def test_a_silent_socket_ends_by_the_deadline(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    began_s = time.monotonic()

    assert -errno.ETIMEDOUT == module.receive_pieces(
        ours.fileno(), [bytearray(1)], 1, began_s + 0.05
    )
    assert ([-errno.ETIMEDOUT], 1, b"") == module.fetch_bulks(
        ours.fileno(), [b"GET"], 0, b"", [[bytearray(1)]], 1, began_s + 0.1
    )
    assert -errno.ETIMEDOUT == module.send_pieces(
        theirs.fileno(), [bytes(64 << 20)], time.monotonic() + 0.05
    )
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("module", BOTH)
def test_a_shutdown_ends_a_call_that_waits(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, _ = pair
    ended: list[int] = []
    waiting = threading.Thread(
        target=lambda: ended.append(module.receive_pieces(ours.fileno(), [bytearray(1)], 1, soon()))
    )
    waiting.start()
    ours.shutdown(socket.SHUT_RDWR)
    waiting.join(SOON_S)

    assert [-errno.ECONNRESET] == ended


@pytest.mark.parametrize("module", BOTH)
def test_a_peer_that_is_gone_is_an_error(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    theirs.close()

    assert -errno.EPIPE == module.send_pieces(ours.fileno(), [b"x"], soon())
    assert -errno.ECONNRESET == module.receive_pieces(ours.fileno(), [bytearray(1)], 1, soon())


@pytest.mark.parametrize("module", BOTH)
def test_a_page_of_no_bytes_is_received(
    module: Any, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    theirs.sendall(b"$0\r\n\r\n")

    assert ([HIT], 1, b"") == module.fetch_bulks(ours.fileno(), [b"GET"], 0, b"", [[]], 1, soon())
