"""GET and SET of pages, against a peer whose replies a test chooses."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest
from hicache_backends.redis.page_io import PageRequest, get_pages, set_pages, window_of
from hicache_backends.redis.replies import UNANSWERED, ErrorReply, Reply, WrongReply
from pages import blank, page

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator

_NBYTES = 100
_BLANK = b"\xa5" * _NBYTES


class Peer:
    """The other end of a socket. It sends its replies before it receives a command."""

    def __init__(self) -> None:
        near, self._far = socket.socketpair()
        self.socket = DeadlineSocket(near, Deadline(10))
        self._near = near
        self._sender = threading.Thread()

    def send(self, *replies: bytes, each: int | None = None) -> None:
        """Send replies, in parts of `each` bytes."""
        data = b"".join(replies)
        if each is None:
            self._far.sendall(data)
            return

        def send_parts() -> None:
            for start in range(0, len(data), each):
                self._far.sendall(data[start : start + each])

        self._sender = threading.Thread(target=send_parts)
        self._sender.start()

    def shut_down(self) -> None:
        self._far.shutdown(socket.SHUT_WR)

    def received(self) -> bytes:
        return self._far.recv(1 << 20)

    def close(self) -> None:
        self._near.close()
        if self._sender.ident is not None:
            self._sender.join()
        self._far.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.close()


def bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)


def contents(count: int, nbytes: int = _NBYTES) -> list[bytes]:
    return [page(nbytes, seed).tobytes() for seed in range(count)]


def got(peer: Peer, pages: list[Page], window: int = 4) -> tuple[list[Reply], Exception | None]:
    """Get pages. Return the verdicts, and the exception if one was raised."""
    replies: list[Reply] = [UNANSWERED] * len(pages)

    def settle(index: int, reply: Reply) -> None:
        replies[index] = reply

    keys = [b"key%d" % number for number in range(len(pages))]
    try:
        get_pages(peer.socket, keys, pages, window, settle)
    except OSError as error:
        return replies, error
    return replies, None


@pytest.mark.usefixtures("transport")
class TestGet:
    @pytest.mark.parametrize("each", [1, 3, 7, None])
    @pytest.mark.parametrize("nbytes", [1, 9, 10, 100, 12345])
    def test_pages_land_however_their_bytes_come(
        self, peer: Peer, nbytes: int, each: int | None
    ) -> None:
        data = contents(3, nbytes)
        pages = [blank(nbytes) for _ in data]
        peer.send(*map(bulk, data), each=each)

        assert ([True] * 3, None) == got(peer, pages)
        assert data == [one.tobytes() for one in pages]

    @pytest.mark.parametrize("each", [1, None])
    def test_a_miss_shifts_nothing(self, peer: Peer, each: int | None) -> None:
        data = contents(3)
        pages = [blank(_NBYTES) for _ in range(5)]
        peer.send(b"$-1\r\n", bulk(data[0]), b"$-1\r\n", *map(bulk, data[1:]), each=each)

        assert ([False, True, False, True, True], None) == got(peer, pages)
        assert [_BLANK, data[0], _BLANK, *data[1:]] == [one.tobytes() for one in pages]

    def test_an_error_in_the_middle_is_its_own_page_s(self, peer: Peer) -> None:
        data = contents(2)
        pages = [blank(_NBYTES) for _ in range(3)]
        peer.send(bulk(data[0]), b"-WRONGTYPE no string\r\n", bulk(data[1]))

        replies, error = got(peer, pages)

        assert [True, ErrorReply("WRONGTYPE", "no string"), True] == replies
        assert error is None
        assert [data[0], _BLANK, data[1]] == [one.tobytes() for one in pages]

    @pytest.mark.parametrize(
        "wrong",
        [bulk(b""), bulk(b"x" * 99), bulk(b"x" * 101), bulk(b"x" * 1000), bulk(b"x" * 7)],
        ids=["empty", "one short", "one long", "one digit more", "tiny"],
    )
    def test_replies_after_a_page_of_another_length_are_not_used(
        self, peer: Peer, wrong: bytes
    ) -> None:
        data = contents(2)
        pages = [blank(_NBYTES) for _ in range(3)]
        peer.send(bulk(data[0]), wrong, bulk(data[1]))

        replies, error = got(peer, pages)

        assert [True, False, UNANSWERED] == replies
        assert isinstance(error, WrongReply)
        assert [data[0], _BLANK] == [pages[0].tobytes(), pages[2].tobytes()]

    @pytest.mark.parametrize(
        "wrong", [b"+OK\r\n", b":1\r\n", b"*1\r\n:1\r\n", b"_\r\n\r\n", b"garbage"]
    )
    def test_a_reply_of_another_kind_ends_the_connection(self, peer: Peer, wrong: bytes) -> None:
        pages = [blank(_NBYTES) for _ in range(2)]
        peer.send(wrong, bulk(contents(1)[0]))

        replies, error = got(peer, pages)

        assert [UNANSWERED] * 2 == replies
        assert isinstance(error, WrongReply)

    def test_a_page_without_its_end_is_no_hit(self, peer: Peer) -> None:
        peer.send(b"$%d\r\n%bXY" % (_NBYTES, contents(1)[0]))

        replies, error = got(peer, [blank(_NBYTES)])

        assert [False] == replies
        assert isinstance(error, WrongReply)

    @pytest.mark.parametrize("cut", [0, 3, 50, 110, 160])
    def test_a_connection_that_ends_settles_only_what_came_whole(
        self, peer: Peer, cut: int
    ) -> None:
        data = contents(2)
        pages = [blank(_NBYTES) for _ in data]
        peer.send(b"".join(map(bulk, data))[:cut])
        peer.shut_down()

        replies, error = got(peer, pages)

        assert [True if cut >= len(bulk(data[0])) else UNANSWERED, UNANSWERED] == replies
        assert isinstance(error, ConnectionResetError)

    def test_silence_ends_with_the_deadline(self, peer: Peer) -> None:
        peer.socket.deadline = Deadline(0.05)

        replies, error = got(peer, [blank(_NBYTES)])

        assert [UNANSWERED] == replies
        assert isinstance(error, TimeoutError)

    def test_no_more_than_the_window_is_asked_for(self, peer: Peer) -> None:
        peer.shut_down()
        got(peer, [blank(_NBYTES) for _ in range(10)], window=2)

        assert 2 == peer.received().count(b"GET")

    def test_many_segments_are_filled_in_order(self, peer: Peer) -> None:
        (data,) = contents(1, 3000)
        memory = bytearray(3000)
        segments = [memoryview(memory)[start : start + 2] for start in range(0, 3000, 2)]
        peer.send(bulk(data))

        assert ([True], None) == got(peer, [Page(*segments)])
        assert data == memory

    @pytest.mark.parametrize("text", [b"E", b"NO", b"ERR"])
    def test_a_short_error_takes_no_other_reply_along(self, peer: Peer, text: bytes) -> None:
        data = contents(1)
        pages = [blank(_NBYTES) for _ in range(3)]
        peer.send(b"-%b\r\n" % text, b"$-1\r\n", bulk(data[0]))

        replies, error = got(peer, pages)

        assert [ErrorReply(text.decode(), ""), False, True] == replies
        assert (None, data[0]) == (error, pages[2].tobytes())

    def test_an_error_without_text_ends_the_connection(self, peer: Peer) -> None:
        peer.send(b"-\r\n", b"$-1\r\n")

        replies, error = got(peer, [blank(_NBYTES) for _ in range(2)])

        assert [UNANSWERED] * 2 == replies
        assert isinstance(error, WrongReply)

    def test_a_null_without_its_end_is_a_miss_of_the_last_reply_that_counts(
        self, peer: Peer
    ) -> None:
        peer.send(b"$-1\rx", bulk(contents(1)[0]))

        replies, error = got(peer, [blank(_NBYTES) for _ in range(2)])

        assert [False, UNANSWERED] == replies
        assert isinstance(error, WrongReply)


def put(peer: Peer, count: int, *, index_command: tuple[bytes, ...] = ()) -> list[Reply]:
    """Set `count` pages. Return their replies."""
    settled: list[Reply] = []
    requests = [PageRequest(b"key", _NBYTES, index_command=index_command)] * count
    pages = [page(_NBYTES, seed) for seed in range(count)]
    set_pages(peer.socket, requests, pages, 4, lambda _, replies: settled.append(replies))
    return settled


@pytest.mark.usefixtures("transport")
class TestSet:
    def test_each_page_has_its_own_replies(self, peer: Peer) -> None:
        peer.send(b":1\r\n+OK\r\n:0\r\n", b":0\r\n$-1\r\n:0\r\n", b"-OOM no\r\n" * 3)

        assert [[1, True, 0], [0, None, 0], [ErrorReply("OOM", "no")] * 3] == put(
            peer, 3, index_command=(b"ZADD", b"index", b"+inf", b"hash")
        )

    def test_a_page_is_listed_before_and_after_its_set(self, peer: Peer) -> None:
        peer.send(b":1\r\n+OK\r\n:0\r\n")
        put(peer, 1, index_command=(b"ZADD", b"i", b"1", b"h"))
        zadd = b"*4\r\n$4\r\nZADD\r\n$1\r\ni\r\n$1\r\n1\r\n$1\r\nh\r\n"
        command = b"*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$100\r\n" + page(_NBYTES).tobytes() + b"\r\n"

        assert zadd + command + zadd == peer.received()

    @pytest.mark.parametrize("wrong", [b"+QUEUED\r\n", b"$5\r\nhello\r\n", b"+OK\r\n+OK\r\n"])
    def test_replies_of_another_kind_or_number_are_not_used(self, peer: Peer, wrong: bytes) -> None:
        peer.send(wrong)

        with pytest.raises(WrongReply):
            put(peer, 1)

    def test_an_integer_of_more_than_64_bits_is_no_reply(self, peer: Peer) -> None:
        """Python converts no more than 4300 digits, and its error is none of a connection's."""
        peer.send(b":" + b"9" * 4400 + b"\r\n")

        with pytest.raises(WrongReply):
            put(peer, 1)

    def test_an_endless_line_is_not_read(self, peer: Peer) -> None:
        peer.send(b"-" + b"x" * 8000)

        with pytest.raises(WrongReply):
            put(peer, 1)


def test_the_window_is_the_depth_for_large_pages_and_wide_for_small_ones() -> None:
    assert 4 == window_of(4, 1 << 20)
    assert 128 == window_of(4, 4096)
    assert 512 == window_of(4, 1)
