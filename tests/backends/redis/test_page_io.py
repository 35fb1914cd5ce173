"""GET and SET of pages, against a peer whose replies a test chooses."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from clocks import in_time
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.layout import SpaceKeys
from hicache_backends.redis.page_io import (
    PageRequest,
    get_lengths,
    get_pages,
    set_pages,
    set_window,
    window_of,
)
from hicache_backends.redis.replies import UNANSWERED, ErrorReply, Reply, WrongReply
from lent_pages import lent_page, revoked
from pages import blank, hash_of, page, space
from redis.crc import key_slot
from redis_servers import Forwarder, RespServer, array, bulk, client_of_one, empty_reply, slots
from servers import RedisServer, wait_until

from hicache_storage import HiCacheError, HiCacheStorage, StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.deadline_socket import DeadlineSocket
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.page import Page

_NBYTES = 100
_LENT_NBYTES = 600_000
"""More than two accesses."""
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

    def test_a_page_that_is_revoked_while_it_arrives_is_a_miss_and_shifts_nothing(
        self, peer: Peer
    ) -> None:
        data = contents(3, _LENT_NBYTES)
        revocable = AtomicRevocable()
        pages = [lent_page(_LENT_NBYTES, None, revocable), blank(_LENT_NBYTES)]
        found: list[object] = []
        half = _LENT_NBYTES // 2
        getting = threading.Thread(target=lambda: found.append(got(peer, pages)))
        getting.start()
        peer.send(bulk(data[0])[:half])
        wait_until(lambda: pages[0].segments[1][half // 2] != 0xA5)
        revocable.revoke()
        pages[0].copy_from(b"\xff" * _LENT_NBYTES)
        peer.send(bulk(data[0])[half:], bulk(data[1]), bulk(data[2]), each=1 << 16)
        getting.join()
        later = lent_page(_LENT_NBYTES)

        assert [([False, True], None)] == found
        assert b"\xff" * _LENT_NBYTES == pages[0].tobytes()
        assert data[1] == pages[1].tobytes()
        assert ([True], None) == got(peer, [later])
        assert data[2] == later.tobytes()

    def test_a_page_that_was_revoked_before_is_not_asked_for(self, peer: Peer) -> None:
        data = contents(2, _LENT_NBYTES)
        lost = [lent_page(_LENT_NBYTES, None, revoked()) for _ in range(3)]
        pages = [lost[0], blank(_LENT_NBYTES), lost[1], lent_page(_LENT_NBYTES), lost[2]]
        peer.send(*map(bulk, data), each=1 << 16)

        assert ([False, True, False, True, False], None) == got(peer, pages)
        assert data == [pages[1].tobytes(), pages[3].tobytes()]
        assert {b"\xa5" * _LENT_NBYTES} == {one.tobytes() for one in lost}
        assert 2 == peer.received().count(b"GET")


def put(peer: Peer, count: int, *, index_command: tuple[bytes, ...] = ()) -> list[Reply]:
    """Set `count` pages. Return their replies."""
    settled: list[Reply] = []
    requests = [PageRequest(b"key", _NBYTES, index_command=index_command)] * count
    pages = [page(_NBYTES, seed) for seed in range(count)]
    set_pages(peer.socket, requests, pages, 4, lambda _, replies: settled.append(replies))
    return settled


def put_lent(peer: Peer, revocables: Sequence[AtomicRevocable | None], nbytes: int) -> list[Reply]:
    """Set a page for each revocable. Return their replies, up to the page that ends the connection."""
    settled: list[Reply] = []
    index_command = (b"ZADD", b"index", b"+inf", b"hash")
    requests = [PageRequest(b"key", nbytes, index_command=index_command)] * len(revocables)
    pages: list[Page] = []
    for seed, revocable in enumerate(revocables):
        data = bytearray(page(nbytes, seed).tobytes())
        half = memoryview(data)[: nbytes // 2], memoryview(data)[nbytes // 2 :]
        pages.append(Page.of_views(half, nbytes, revocable))
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
        """Python converts at most 4300 digits, and would raise an error that no connection raises."""
        peer.send(b":" + b"9" * 4400 + b"\r\n")

        with pytest.raises(WrongReply):
            put(peer, 1)

    def test_a_page_that_was_revoked_before_is_not_sent(self, peer: Peer) -> None:
        revocables = [None, revoked(), AtomicRevocable(), revoked()]
        peer.send(b":1\r\n+OK\r\n:0\r\n", b":0\r\n$-1\r\n:0\r\n")

        settled = put_lent(peer, revocables, _NBYTES)
        sent = peer.received()

        assert [[1, True, 0], [False] * 3, [0, None, 0], [False] * 3] == settled
        assert [True, False, True, False] == [
            data[50:] in sent
            for data in contents(4)  # `put_lent` cuts pages in the middle
        ]

    def test_a_page_that_is_revoked_while_it_is_sent_is_never_whole_at_the_server(
        self, peer: Peer
    ) -> None:
        nbytes, revocable, settled = 16 << 20, AtomicRevocable(), list[Reply]()
        peer.send(b":1\r\n+OK\r\n:0\r\n")
        lent = [AtomicRevocable(), revocable, revocable]
        setting = threading.Thread(target=lambda: settled.extend(put_lent(peer, lent, nbytes)))
        setting.start()
        received = bytearray()
        while len(received) < nbytes * 3 // 2:
            received += peer.received()
        revocable.revoke()
        while more := peer.received():
            received += more
        setting.join()

        assert [[1, True, 0], [False] * 3] == settled
        assert len(received) < 2 * nbytes
        assert 2 == received.count(b"$3\r\nSET\r\n")

    def test_an_endless_line_is_not_read(self, peer: Peer) -> None:
        peer.send(b"-" + b"x" * 8000)

        with pytest.raises(WrongReply):
            put(peer, 1)


@pytest.mark.parametrize(
    ("depth", "nbytes", "is_alone", "pages"),
    [(4, 1 << 20, True, 4), (4, 1 << 20, False, 1), (4, 1 << 17, False, 4), (1, 1 << 17, True, 1)],
)
def test_one_large_page_is_set_at_a_time_if_that_keeps_the_server_busy(
    depth: int,
    nbytes: int,
    is_alone: bool,  # noqa: FBT001
    pages: int,
) -> None:
    assert pages == set_window(depth, nbytes, is_alone=is_alone)


def test_the_window_is_the_depth_for_large_pages_and_wide_for_small_ones() -> None:
    assert 4 == window_of(4, 1 << 20)
    assert 128 == window_of(4, 4096)
    assert 512 == window_of(4, 1)


# Replies that no Redis server should send. They lead to answers, or to errors of this package.

SPACE = space()
FEW = [hash_of(number) for number in range(3)]
LAST_SLOT = 16383

ODD = [
    b"+OK\r\n",
    b":1\r\n",
    b":-7\r\n",
    b":99999999999999999999\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$3\r\n\xff\xfe\x00\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*1\r\n$-1\r\n",
    b"*2\r\n$1\r\n0\r\n:1\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n",
    b"*2\r\n:0\r\n*0\r\n",
    b"*1\r\n" * 50 + b"*0\r\n",
    b"-\r\n",
    b"-ERR\r\n",
    b"-ERR \xff\xfe\r\n",
    b"-\xff\xfe \xff\r\n",
    b"-MOVED\r\n",
    b"-ASK 1\r\n",
    b"-ERR invalid password\r\n",
    b"-NOPERM no\r\n",
    b"garbage\r\n",
    b"\x15\x03\x03\x00\x02\x02\x16",
    b"$5\r\n" + b"[" * 5 + b"\r\n",
    b"*1\r\n" + bulk(b"[" * 100_000),
    b"*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\n?\r\n:1\r\n",
]


class TestOddReplies:
    @pytest.mark.parametrize("is_cluster", [False, True])
    @pytest.mark.parametrize("seed", range(12))
    def test_none_is_a_foreign_error(self, seed: int, *, is_cluster: bool) -> None:
        """Every malformed reply leads to an answer, or to an error of this package."""
        choice = random.Random(seed)
        well = threading.Event()
        well.set()

        def answer(command: list[bytes]) -> bytes:
            if not well.is_set() and choice.random() < 0.7:
                return choice.choice(ODD)
            if command[0] == b"CLUSTER":
                return slots((0, LAST_SLOT, server.port))
            return empty_reply(command, is_cluster=is_cluster)

        with RespServer(answer) as server:
            config = {"url": server.url, "timeout_s": 0.2, "password": "hunter2"}
            with in_time(lambda: RedisStorage.from_config(config)) as storage:
                calls: list[Callable[[], Any]] = [
                    lambda: storage.open_space(space(model=str(choice.random()))),
                    lambda: storage.batch_exists(SPACE, FEW),
                    lambda: storage.batch_get(SPACE, FEW, [blank() for _ in range(3)]),
                    lambda: storage.batch_set(SPACE, FEW, [page()] * 3),
                    lambda: storage.batch_delete(SPACE, FEW),
                    lambda: list(storage.spaces()),
                    lambda: next(storage.scan(SPACE), None),
                    lambda: RedisStorage.from_config(config).close(),
                ]
                for _ in range(6):
                    for call in calls:
                        well.clear()
                        with suppress(HiCacheError):
                            call()
                well.set()
                wait_until(lambda: _is_well(storage))

    def test_a_password_repeated_by_a_server_is_not_shown(self) -> None:
        def answer(command: list[bytes]) -> bytes:
            if command[0] == b"AUTH":
                args = b" ".join(b"`%b`" % part for part in command[1:])
                return b"-ERR unknown command `AUTH`, with args beginning with: %b\r\n" % args
            return empty_reply(command)

        with RespServer(answer) as server, pytest.raises(HiCacheError) as raised:
            RedisStorage.from_config({"url": server.url, "password": "hunter2"})

        error: BaseException | None = raised.value
        while error is not None:
            assert "hunter2" not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        assert "unknown command" in str(raised.value)


def _is_well(storage: RedisStorage) -> bool:
    try:
        return storage.batch_exists(SPACE, FEW) == [False] * 3
    except HiCacheError:
        return False


# Batches of the redis backend: failovers, redirections and incomplete replies.

HASHES = [hash_of(number) for number in range(200)]
KEYS = SpaceKeys("hicache:", SPACE.id)
HALF = 8192
"""The number of slots of each server."""


class TestFailover:
    def test_a_demoted_server_behind_a_service_address_is_left(self, tmp_path: Path) -> None:
        with (
            RedisServer(tmp_path / "first") as first,
            RedisServer(tmp_path / "second") as second,
            Forwarder(first.port) as forwarder,
            RedisStorage.from_config({"url": forwarder.url}) as storage,
        ):
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            client_of_one(first).replicaof("127.0.0.1", second.port)
            forwarder.target_port = second.port

            assert [True] == storage.batch_set(SPACE, HASHES[1:2], [page()])
            assert 1 == client_of_one(second).exists(KEYS.page(HASHES[1]))

    @pytest.mark.parametrize(
        "word",
        [
            "READONLY You can't write against a read only replica.",
            "LOADING Redis is loading the dataset in memory",
            "MASTERDOWN Link with MASTER is down",
            "NOAUTH Authentication required.",
            "CLUSTERDOWN The cluster is down",
            "UNBLOCKED force unblock from blocking operation",
        ],
    )
    def test_an_error_about_the_state_of_a_server_ends_its_connections(self, word: str) -> None:
        error = b"-%b\r\n" % word.encode()

        def first_reply(command: list[bytes]) -> bytes:
            name = command[0]
            return (
                error if name in (b"GET", b"STRLEN", b"UNLINK", b"ZADD") else empty_reply(command)
            )

        with (
            RespServer(empty_reply) as first,
            RespServer(empty_reply) as second,
            Forwarder(first.port) as forwarder,
            RedisStorage.from_config({"url": forwarder.url, "timeout_s": 5}) as storage,
        ):
            storage.open_space(SPACE)
            calls: list[Callable[[], Any]] = [
                lambda: storage.batch_get(SPACE, HASHES[:2], [blank(), blank()]),
                lambda: storage.batch_exists(SPACE, HASHES[:2]),
                lambda: storage.batch_delete(SPACE, HASHES[:2]),
            ]
            for call in calls:
                forwarder.target_port = first.port
                first.answer = first_reply
                storage._sessions.get().pools.at(storage._settings.address)._close_idle()
                with suppress(StorageUnavailable):
                    call()
                forwarder.target_port = second.port
                call()

    def test_connections_in_use_are_left_too(self, tmp_path: Path) -> None:
        """Connections that were opened before the failure may lead to the same failed server."""
        with (
            RespServer(empty_reply) as server,
            RedisStorage.from_config({"url": server.url}) as storage,
        ):
            pool = storage._sessions.get().pools.at(storage._settings.address)
            with ExitStack() as stack:
                stack.enter_context(pool.acquire(Deadline(5)))
                with pytest.raises(OSError, match="no"), pool.acquire(Deadline(5)):
                    raise OSError("no")
            assert [] == pool._idle

    def test_a_damaged_page_costs_one_connection(self) -> None:
        with (
            RespServer(empty_reply) as server,
            RedisStorage.from_config({"url": server.url}) as storage,
        ):
            pool = storage._sessions.get().pools.at(storage._settings.address)
            with pool.acquire(Deadline(5)), pool.acquire(Deadline(5)):
                """Make two connections."""
            server.answer = lambda command: (
                bulk(b"short") if command[0] == b"GET" else empty_reply(command)
            )
            assert [False] == storage.batch_get(SPACE, HASHES[:1], [blank()])

            assert 1 == len(pool._idle)


class Cluster:
    """Two servers with half of the slots each. A test chooses their replies."""

    def __init__(self) -> None:
        self.first, self.second = RespServer(self._first), RespServer(self._second)
        self.second_reply: Callable[[list[bytes]], bytes | None] = self.default_reply
        self.first_reply: Callable[[list[bytes]], bytes | None] = self.default_reply
        self.members: dict[bytes, list[bytes]] = {}
        for page_hash in HASHES:
            members = self.members.setdefault(KEYS.index(page_hash[:2]), [])
            members.append(page_hash.encode())

    def default_reply(self, command: list[bytes]) -> bytes | None:
        if command[0] == b"CLUSTER":
            return slots((0, HALF - 1, self.first.port), (HALF, 2 * HALF - 1, self.second.port))
        if command[0] == b"ZSCAN":
            found = self.members.get(command[1], [])
            return array(
                bulk(b"0"), array(*(bulk(part) for one in found for part in (one, b"inf")))
            )
        if command[0] == b"STRLEN":
            return b":%d\r\n" % SPACE.stored_nbytes
        return empty_reply(command, is_cluster=True)

    def _first(self, command: list[bytes]) -> bytes | None:
        return self.first_reply(command)

    def _second(self, command: list[bytes]) -> bytes | None:
        return self.second_reply(command)

    def second_refuses(self, *names: bytes, with_: bytes = b"CLUSTERDOWN no") -> None:
        """Make the second server answer some commands with an error."""
        self.second_reply = lambda command: (
            b"-%b\r\n" % with_ if command[0] in names else self.default_reply(command)
        )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    with made.first, made.second:
        yield made


@pytest.fixture
def storage(cluster: Cluster) -> Iterator[HiCacheStorage]:
    config = {"url": cluster.first.url, "timeout_s": 5}
    with RedisStorage.from_config(config) as storage:
        yield storage


def of_second() -> int:
    return sum(key_slot(KEYS.page(page_hash)) >= HALF for page_hash in HASHES)


class TestHalfAnswers:
    def test_all_is_listed_and_cleared_where_all_answer(self, storage: RedisStorage) -> None:
        assert 0 < of_second() < len(HASHES)
        assert len(HASHES) == len(list(storage.scan(SPACE)))
        assert len(HASHES) == storage.clear(SPACE)

    @pytest.mark.parametrize("name", [b"UNLINK", b"STRLEN", b"ZSCAN"])
    def test_a_clear_of_which_a_part_was_not_answered_raises(
        self, cluster: Cluster, storage: RedisStorage, name: bytes
    ) -> None:
        cluster.second_refuses(name)

        with pytest.raises(StorageUnavailable):
            storage.clear(SPACE)

    @pytest.mark.parametrize("name", [b"STRLEN", b"ZSCAN"])
    @pytest.mark.parametrize("error", [b"CLUSTERDOWN no", b"LOADING no", b"NOPERM no", b"ERR no"])
    def test_a_listing_of_which_a_part_was_not_answered_raises(
        self, cluster: Cluster, storage: RedisStorage, name: bytes, error: bytes
    ) -> None:
        """A length that was not answered does not mean that the page is missing."""
        cluster.second_refuses(name, with_=error)

        with pytest.raises(StorageUnavailable):
            list(storage.scan(SPACE))

    def test_a_listing_of_which_a_part_ended_in_the_middle_raises(
        self, cluster: Cluster, storage: RedisStorage
    ) -> None:
        cluster.second_reply = lambda command: (
            b"gibberish\r\n" if command[0] == b"STRLEN" else cluster.default_reply(command)
        )
        with pytest.raises(StorageUnavailable):
            list(storage.scan(SPACE))

    def test_a_walk_during_which_slots_moved_raises(
        self, cluster: Cluster, storage: RedisStorage
    ) -> None:
        """If the user may not ask each server for its slots, the cluster's slot map shows the move."""
        facts = bulk(b"maxmemory_policy:allkeys-lru\r\ncluster_enabled:1\r\n")
        owners = [slots((0, 2 * HALF - 1, cluster.first.port))]

        def answer(command: list[bytes]) -> bytes | None:
            if command[0] == b"SCAN":
                owners[:] = [slots((0, 2 * HALF - 1, cluster.second.port))]
            if command[:2] == [b"CLUSTER", b"NODES"]:
                return b"-NOPERM this user has no permissions\r\n"
            replies = {b"INFO": facts, b"CLUSTER": owners[0]}
            return replies.get(command[0]) or cluster.default_reply(command)

        cluster.first_reply = cluster.second_reply = answer
        storage._sessions.get().deployment.invalidate()
        with pytest.raises(StorageUnavailable, match="list again"):
            list(storage.scan(SPACE))

    def test_slots_without_a_server_cost_their_own_pages_only(
        self, cluster: Cluster, storage: RedisStorage
    ) -> None:
        part = slots((0, HALF - 1, cluster.first.port))
        cluster.first_reply = lambda command: (
            part if command[0] == b"CLUSTER" else cluster.default_reply(command)
        )
        storage._sessions.get().deployment.invalidate()

        there = storage.batch_exists(SPACE, HASHES)
        assert len(HASHES) - of_second() == there.count(True)
        with pytest.raises(StorageUnavailable):
            list(storage.scan(SPACE))
        with pytest.raises(StorageUnavailable):
            storage.clear(SPACE)


class TestRedirections:
    @pytest.mark.parametrize("host", ["", "127.0.0.1"])
    def test_ask_without_a_host_means_the_server_that_replied(
        self, cluster: Cluster, storage: RedisStorage, host: str
    ) -> None:
        data = page().tobytes()
        target = f"{host}:{cluster.second.port}".encode()
        cluster.first_reply = lambda command: (
            b"-ASK 1 %b\r\n" % target if command[0] == b"GET" else cluster.default_reply(command)
        )
        cluster.second_reply = lambda command: (
            bulk(data) if command[0] == b"GET" else cluster.default_reply(command)
        )
        pages = [blank() for _ in HASHES]

        assert [True] * len(HASHES) == storage.batch_get(SPACE, HASHES, pages)
        assert data == pages[0].tobytes()

    @pytest.mark.parametrize("target", [b"", b"nowhere", b"here:99999999", b"\xff:1", b"a:b:c"])
    @pytest.mark.parametrize("code", [b"ASK", b"MOVED"])
    def test_a_redirection_that_names_no_server_is_no_foreign_error(
        self, cluster: Cluster, storage: RedisStorage, code: bytes, target: bytes
    ) -> None:
        cluster.second_refuses(b"GET", b"STRLEN", with_=b"%b 1 %b" % (code, target))
        cluster.first_reply = cluster.second_reply

        # A name server may be slow to answer that there is no such name.
        ours = (StorageUnavailable, StorageTimeout)
        with pytest.raises(ours):
            storage.batch_get(SPACE, HASHES, [blank() for _ in HASHES])
        with pytest.raises(ours):
            storage.batch_exists(SPACE, HASHES)

    def test_servers_that_send_each_other_the_caller_end_it(
        self, cluster: Cluster, storage: RedisStorage
    ) -> None:
        def sends_to(other: RespServer) -> Callable[[list[bytes]], bytes | None]:
            error = b"-ASK 1 127.0.0.1:%d\r\n" % other.port
            return lambda command: (
                error if command[0] == b"STRLEN" else cluster.default_reply(command)
            )

        cluster.first_reply, cluster.second_reply = (
            sends_to(cluster.second),
            sends_to(cluster.first),
        )
        with pytest.raises(StorageUnavailable, match="ASK"):
            storage.batch_exists(SPACE, HASHES[:3])


@pytest.mark.usefixtures("transport")
class TestLengths:
    def test_each_key_has_its_own_reply(self, peer: Peer) -> None:
        peer.send(b":7\r\n:0\r\n-WRONGTYPE no string\r\n")
        request = b"*2\r\n$6\r\nSTRLEN\r\n$1\r\n%b\r\n"

        assert [7, 0, ErrorReply("WRONGTYPE", "no string")] == get_lengths(
            peer.socket, [b"a", b"b", b"c"]
        )
        assert request % b"a" + request % b"b" + request % b"c" == peer.received()

    @pytest.mark.parametrize("wrong", [b"+OK\r\n", b"$-1\r\n", b":1\r\n:1\r\n", b"*0\r\n"])
    def test_what_is_not_a_length_is_not_used(self, peer: Peer, wrong: bytes) -> None:
        peer.send(wrong)

        with pytest.raises(WrongReply):
            get_lengths(peer.socket, [b"a"])

    def test_no_keys_need_no_server(self, peer: Peer) -> None:
        assert [] == get_lengths(peer.socket, [])
