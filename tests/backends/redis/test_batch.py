"""Batches of the redis backend: failovers, redirections, and replies of which a part is missing."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.layout import SpaceKeys
from pages import blank, hash_of, page, space
from redis.crc import key_slot
from redis_servers import Forwarder, RespServer, array, bulk, client_of_one, empty_reply, slots
from servers import RedisServer

from hicache_storage import StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache_storage import HiCacheStorage

SPACE = space()
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
                storage._sessions.get().pools.at(storage._settings.address)._drop_idle()
                with suppress(StorageUnavailable):
                    call()
                forwarder.target_port = second.port
                call()

    def test_connections_in_use_are_left_too(self, tmp_path: Path) -> None:
        """Connections of the failed one's generation may lead to the same server."""
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
        """A missing length is not the length of a missing page."""
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
        """The map of the slots tells it where the user may not ask each server for its own."""
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
