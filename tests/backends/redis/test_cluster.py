"""The redis backend on clusters and behind sentinels: slots that move, servers that fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.index import Index
from hicache_backends.redis.layout import SpaceKeys
from pages import blank, hash_of, page, space
from redis.crc import key_slot
from redis_servers import RespServer, SentinelServer, array, bulk, client_of_one, empty_reply
from servers import RedisCluster, RedisServer, free_port, wait_until

from hicache_storage import HiCacheStorage, StorageUnavailable

Answer = Callable[[list[bytes]], bytes]

HASHES = [hash_of(number) for number in range(60)]
PREFIX = "test:"
KEYS = SpaceKeys(PREFIX, space().id)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: RedisCluster) -> RedisCluster:
    """Return an empty cluster."""
    for node in shared.nodes:
        client_of_one(node).flushall()
        client_of_one(node).config_set("maxmemory-policy", "noeviction")
    return shared


@pytest.fixture
def storage(cluster: RedisCluster) -> Iterator[RedisStorage]:
    with RedisStorage.from_config({"url": cluster.url, "prefix": PREFIX}) as storage:
        yield storage


def set_all(storage: RedisStorage) -> list[bool]:
    return storage.batch_set(space(), HASHES, [page(4096, seed) for seed in range(len(HASHES))])


def must_get_all(storage: RedisStorage) -> None:
    pages = [blank() for _ in HASHES]
    assert [True] * len(HASHES) == storage.batch_get(space(), HASHES, pages)
    for seed, one in enumerate(pages):
        assert page(4096, seed).tobytes() == one.tobytes()


class Move:
    """The migration of a slot with pages from one server to another."""

    def __init__(self, cluster: RedisCluster, page_hash: str) -> None:
        self.slot = key_slot(KEYS.page(page_hash))
        self._cluster = cluster
        self._ids = {
            node: client_of_one(node).execute_command("CLUSTER", "MYID") for node in cluster.nodes
        }
        self.source = next(node for node in cluster.nodes if self._has_slot(node))
        self.target = next(node for node in cluster.nodes if node is not self.source)

    def back(self) -> Move:
        """Return the move that undoes this one."""
        undone = copy.copy(self)
        undone.source, undone.target = self.target, self.source
        return undone

    def _has_slot(self, node: RedisServer) -> bool:
        for first, last, master, *_ in client_of_one(node).execute_command("CLUSTER", "SLOTS"):
            if first <= self.slot <= last:
                return bool(master[1] == node.port)
        return False

    def begin(self) -> None:
        ids = {node: text.decode() for node, text in self._ids.items()}
        self._set_slot(self.target, "IMPORTING", ids[self.source])
        self._set_slot(self.source, "MIGRATING", ids[self.target])

    def migrate(self, *keys: bytes) -> None:
        """Migrate these keys, or all keys of the slot."""
        taken = keys or client_of_one(self.source).execute_command(
            "CLUSTER", "GETKEYSINSLOT", self.slot, 1000
        )
        if taken:
            client_of_one(self.source).execute_command(
                *("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, "KEYS", *taken)
            )

    def end(self) -> None:
        for node in (self.target, self.source, *self._cluster.nodes):
            self._set_slot(node, "NODE", self._ids[self.target].decode())

    def _set_slot(self, node: RedisServer, *what: str) -> None:
        client_of_one(node).execute_command("CLUSTER", "SETSLOT", self.slot, *what)


class TestCluster:
    def test_pages_of_a_key_space_are_on_every_server(
        self, cluster: RedisCluster, storage: RedisStorage
    ) -> None:
        assert [True] * len(HASHES) == set_all(storage)

        assert all(client_of_one(node).dbsize() > 10 for node in cluster.nodes)
        must_get_all(storage)

    def test_it_is_found_out_that_a_server_is_one_of_many(self, cluster: RedisCluster) -> None:
        for node in cluster.nodes:
            with RedisStorage.from_config({"url": node.url, "prefix": PREFIX}) as storage:
                set_all(storage)
                must_get_all(storage)

    def test_a_slot_that_has_moved_is_found(
        self, cluster: RedisCluster, storage: RedisStorage
    ) -> None:
        set_all(storage)
        move = Move(cluster, HASHES[0])
        move.begin()
        move.migrate()
        move.end()

        must_get_all(storage)
        assert storage.stats().counters["redirected"] > 0
        assert [True] * len(HASHES) == storage.batch_delete(space(), HASHES)
        assert [True] * len(HASHES) == set_all(storage)
        assert len(HASHES) == len(list(storage.scan(space())))

    @pytest.mark.parametrize("index_first", [True, False])
    def test_a_slot_on_its_way_works(
        self, cluster: RedisCluster, storage: RedisStorage, *, index_first: bool
    ) -> None:
        """Some keys of the slot have moved already. New keys go to the target."""
        victim, late = HASHES[1], HASHES[1][:2] + HASHES[2][2:]
        set_all(storage)
        move = Move(cluster, victim)
        move.begin()
        move.migrate(KEYS.index(victim[:2]) if index_first else KEYS.page(victim))

        must_get_all(storage)
        assert [False] == storage.batch_exists(space(), [late])
        assert [True] == storage.batch_set(space(), [late], [page()])
        assert [True] == storage.batch_get(space(), [late], [blank()])
        move.migrate()
        move.end()
        must_get_all(storage)
        listed = {info.page_hash for info in storage.scan(space())}
        assert {*HASHES, late} == listed
        assert len(HASHES) + 1 == storage.clear(space())

    @pytest.mark.parametrize("how", ["it moves", "it moves there and back", "it is on its way"])
    def test_a_walk_in_which_a_slot_moves_is_no_listing(
        self,
        cluster: RedisCluster,
        storage: RedisStorage,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
    ) -> None:
        """The slot's pages are then on a server that the walk has already passed."""
        for node in cluster.nodes:
            client_of_one(node).config_set("maxmemory-policy", "allkeys-lru")
        set_all(storage)
        move = Move(cluster, HASHES[0])
        walk = Index._walk

        def walk_and_move(index: Index, *place: Any) -> Iterator[list[bytes]]:
            yield from walk(index, *place)
            monkeypatch.setattr(Index, "_walk", walk)
            for one in [move, move.back()] if "back" in how else [move]:
                one.begin()
                one.migrate()
                if "moves" in how:
                    one.end()

        monkeypatch.setattr(Index, "_walk", walk_and_move)
        with pytest.raises(StorageUnavailable, match="list again"):
            list(storage.scan(space()))
        if "way" in how:
            move.end()

    def test_a_server_that_fails_costs_its_own_pages_only(
        self, cluster: RedisCluster, storage: RedisStorage
    ) -> None:
        set_all(storage)
        lost = cluster.nodes[2]
        lost.stop()
        try:
            verdicts = storage.batch_get(space(), HASHES, [blank() for _ in HASHES])
            assert True in verdicts
            assert False in verdicts
            assert verdicts == storage.batch_exists(space(), HASHES)
        finally:
            lost.start()
        wait_until(lambda: all(_takes_all(storage) for _ in range(2)))
        must_get_all(storage)


def _takes_all(storage: RedisStorage) -> bool:
    try:
        return all(set_all(storage))
    except StorageUnavailable:
        return False


class TestSentinels:
    def test_the_master_is_found_and_its_successor_too(self, tmp_path: Path) -> None:
        with (
            RedisServer(tmp_path / "first") as master,
            RedisServer(tmp_path / "second", "--replicaof", f"127.0.0.1 {master.port}") as replica,
            SentinelServer(tmp_path / "sentinel", master.port) as sentinel,
        ):
            config = {
                "url": "redis://",
                "sentinels": [f"127.0.0.1:{free_port()}", f"127.0.0.1:{sentinel.port}"],
                "sentinel_master": sentinel.master,
                "timeout_s": 3,
            }
            sentinel.wait_for_replica()
            with RedisStorage.from_config(config) as storage:
                assert [True] * len(HASHES) == set_all(storage)
                must_get_all(storage)
                wait_until(
                    lambda: client_of_one(replica).dbsize() == client_of_one(master).dbsize()
                )
                master.stop()
                wait_until(lambda: _takes_all(storage))
                must_get_all(storage)


# The redis backend behind sentinels that fail, or that name no master that is up.

FLAWS = {
    "another name": {b"name": b"other"},
    "a replica": {b"flags": b"slave"},
    "subjectively down": {b"flags": b"s_down,master"},
    "objectively down": {b"flags": b"s_down,o_down,master"},
    "disconnected": {b"flags": b"master,disconnected"},
    "no address": {b"ip": b""},
    "no port": {b"port": b"none"},
}


@pytest.fixture
def master() -> Iterator[RespServer]:
    with RespServer(empty_reply) as master:
        yield master


def sentinel_answer(master: RespServer, changes: Mapping[bytes, bytes] | None = None) -> Answer:
    """Return the answers of a sentinel that names `master`, with some fields changed."""
    fields = {b"name": b"m", b"ip": b"127.0.0.1", b"port": b"%d" % master.port, b"flags": b"master"}
    fields |= changes or {}
    state = array(*(bulk(part) for item in fields.items() for part in item))
    return lambda command: array(state) if command[0] == b"SENTINEL" else empty_reply(command)


def raw_answer(reply: bytes) -> Answer:
    return lambda command: reply if command[0] == b"SENTINEL" else empty_reply(command)


def opened(*ports: int, timeout_s: float = 5) -> HiCacheStorage:
    return RedisStorage.from_config(
        {
            "url": "redis://ignored",
            "sentinels": [f"127.0.0.1:{port}" for port in ports],
            "sentinel_master": "m",
            "timeout_s": timeout_s,
        }
    )


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_master_that_is_not_up_is_not_used(master: RespServer, flaw: str) -> None:
    with (
        RespServer(sentinel_answer(master, FLAWS[flaw])) as first,
        RespServer(sentinel_answer(master)) as second,
    ):
        opened(first.port, second.port).close()
        with pytest.raises(StorageUnavailable, match=r"'m': .*: it knows no such master"):
            opened(first.port)


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR no\r\n",
        b"-NOAUTH no\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n:1\r\n",
        b"*0\r\n",
        b"?\r\n",
    ],
)
def test_the_next_sentinel_is_asked_after_a_malformed_reply(
    master: RespServer, reply: bytes
) -> None:
    with (
        RespServer(raw_answer(reply)) as first,
        RespServer(sentinel_answer(master)) as second,
    ):
        opened(first.port, second.port).close()
        with pytest.raises(StorageUnavailable, match="no sentinel names the master"):
            opened(first.port)


def test_silent_sentinels_leave_time_for_the_last_one(master: RespServer) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(RespServer(lambda _: None)).port for _ in range(3)]
        sentinel = stack.enter_context(RespServer(sentinel_answer(master)))

        opened(*silent, sentinel.port, timeout_s=2).close()


def test_a_sentinel_that_cannot_be_reached_is_named() -> None:
    port = free_port()

    with pytest.raises(StorageUnavailable, match=f"127.0.0.1:{port}: cannot connect"):
        opened(port)
