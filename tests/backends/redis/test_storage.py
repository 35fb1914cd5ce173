"""The redis backend on a real server: keys in the database, round trips, capabilities."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hicache_backends.redis import RedisStorage, batch
from hicache_backends.redis.connection import Connection
from hicache_backends.redis.diagnosis import diagnoses
from hicache_backends.redis.layout import BUCKETS, SpaceKeys, registry
from hicache_conformance import FaultProxy
from lent_pages import lent_page
from pages import blank, hash_of, page, space
from redis_servers import PREFIX, client_of_one, hashes_of, must_get, open_on, pages_of
from servers import ROOT, RedisServer, wait_until

from hicache_storage import Page, Retention, StorageUnavailable
from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.storage import Diagnosis

MIB = 1 << 20


class TestDatabase:
    def test_a_page_is_a_string_of_its_bytes_beside_its_index(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.open_space(space())
        storage.batch_set(space(), [hash_of(1)], [page()])
        keys = SpaceKeys(PREFIX, space().id)

        with client_of_one(server) as admin:
            assert page().tobytes() == admin.get(keys.page(hash_of(1)))
            assert [hash_of(1).encode()] == admin.zrange(keys.index(hash_of(1)[:2]), 0, -1)
            assert 1 == admin.hlen(registry(PREFIX))
            assert 3 == admin.dbsize()

    def test_nothing_is_left_after_a_delete(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(50), pages_of(50))
        storage.batch_delete(space(), hashes_of(50))

        with client_of_one(server) as admin:
            assert [registry(PREFIX)] == admin.keys("*")

    @pytest.mark.parametrize("wrong", [b"", b"short", b"x" * 5000])
    def test_a_value_of_another_length_is_replaced(
        self, server: RedisServer, storage: RedisStorage, wrong: bytes
    ) -> None:
        with client_of_one(server) as admin:
            admin.set(SpaceKeys(PREFIX, space().id).page(hash_of(1)), wrong)

        assert [False] == storage.batch_exists(space(), [hash_of(1)])
        assert [True] == storage.batch_set(space(), [hash_of(1)], [page()])
        assert [page().tobytes()] == must_get(storage, space(), [hash_of(1)])

    def test_a_value_that_is_no_string_is_a_miss_and_is_replaced(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(3), pages_of(3))
        with client_of_one(server) as admin:
            key = SpaceKeys(PREFIX, space().id).page(hash_of(1))
            admin.delete(key)
            admin.lpush(key, "a list")

        pages = [blank() for _ in range(3)]
        assert [True, False, True] == storage.batch_get(space(), hashes_of(3), pages)
        assert [True, False, True] == storage.batch_exists(space(), hashes_of(3))
        assert [True] * 3 == storage.batch_set(space(), hashes_of(3), pages_of(3))
        assert [one.tobytes() for one in pages_of(3)] == must_get(storage, space(), hashes_of(3))

    def test_many_pages_of_another_length_cost_only_themselves(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(40), pages_of(40))
        with client_of_one(server) as admin:
            for number in range(0, 40, 2):
                admin.append(SpaceKeys(PREFIX, space().id).page(hash_of(number)), b"!")

        verdicts = storage.batch_get(space(), hashes_of(40), [blank() for _ in range(40)])

        assert [False, True] * 20 == verdicts
        assert 20 == storage.stats().counters["wrong_replies"]

    def test_pages_expire(self, server: RedisServer) -> None:
        with open_on(server, ttl_s=0.05) as storage:
            assert Retention.BEST_EFFORT is storage.capabilities.retention
            assert [True] == storage.batch_set(space(), [hash_of(1)], [page()])
            wait_until(lambda: storage.batch_exists(space(), [hash_of(1)]) == [False])

            assert [] == list(storage.scan(space()))
            with client_of_one(server) as admin:
                assert 0 == admin.zcard(SpaceKeys(PREFIX, space().id).index(hash_of(1)[:2]))

    def test_expired_pages_leave_the_indices_without_a_listing(
        self, server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hicache_backends.redis.index._TRIM_SHARE", 1.0)
        keys = SpaceKeys(PREFIX, space().id)
        with open_on(server, ttl_s=60) as storage, client_of_one(server) as admin:
            index = keys.index(hash_of(1)[:2])
            admin.zadd(index, {"gone long ago": time.time() - 3600})
            storage.batch_set(space(), [hash_of(1)], [page()])

            assert [hash_of(1).encode()] == admin.zrange(index, 0, -1)

    def test_key_spaces_are_listed_again_after_the_database_was_emptied(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.open_space(space())
        with client_of_one(server) as admin:
            admin.flushall()

        assert [space()] == list(storage.spaces())


class TestListings:
    def test_they_do_not_walk_the_database(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(300), pages_of(300))
        with client_of_one(server) as admin:
            admin.execute_command("DEBUG", "POPULATE", 100_000, "somebody-s")
            assert set(hashes_of(300)) == {info.page_hash for info in storage.scan(space())}
            assert 300 == storage.clear(space())
            calls = admin.info("commandstats")
            assert 100_001 == admin.dbsize()

        assert not {"cmdstat_scan", "cmdstat_keys", "cmdstat_flushdb"} & calls.keys()
        assert calls["cmdstat_zscan"]["calls"] == 2 * len(BUCKETS)

    def test_an_index_that_was_evicted_hides_no_page(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        """The server's eviction policy changes while a storage is open."""
        storage.batch_set(space(), hashes_of(300), pages_of(300))
        with client_of_one(server) as admin:
            admin.config_set("maxmemory-policy", "allkeys-lru")
            keys = SpaceKeys(PREFIX, space().id)
            admin.delete(*(keys.index(bucket) for bucket in BUCKETS))

        assert sorted(hashes_of(300)) == sorted(info.page_hash for info in storage.scan(space()))
        assert 300 == storage.clear(space())
        assert [] == list(storage.scan(space()))

    def test_evictions_under_an_earlier_policy_still_count(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(20), pages_of(20))
        keys = SpaceKeys(PREFIX, space().id)
        with client_of_one(server) as admin:
            admin.delete(*(keys.index(bucket) for bucket in BUCKETS))
            admin.config_set("maxmemory-policy", "allkeys-random")
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 50_000)
            for number in range(100):
                admin.set(f"other {number}", b"x" * 4096)
            admin.config_set("maxmemory", 0)
            admin.config_set("maxmemory-policy", "noeviction")
            assert admin.info("stats")["evicted_keys"] > 0

        there = storage.batch_exists(space(), hashes_of(20))
        assert sum(there) == len(list(storage.scan(space())))

    def test_a_page_whose_writer_died_before_it_was_set_is_not_listed(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        index = SpaceKeys(PREFIX, space().id).index(hash_of(1)[:2])
        with client_of_one(server) as admin:
            admin.zadd(index, {hash_of(1): "inf"})

            assert [] == list(storage.scan(space()))
            assert 0 == admin.exists(index)


class TestClaims:
    @pytest.mark.parametrize(
        ("policy", "ttl_s", "retention"),
        [
            ("noeviction", None, Retention.UNTIL_DELETED),
            ("volatile-ttl", None, Retention.UNTIL_DELETED),
            ("allkeys-lfu", None, Retention.UNTIL_PRESSURE),
            ("noeviction", 60, Retention.BEST_EFFORT),
        ],
    )
    def test_retention_follows_the_server_s_policy(
        self, server: RedisServer, policy: str, ttl_s: float | None, retention: Retention
    ) -> None:
        with client_of_one(server) as admin:
            admin.config_set("maxmemory-policy", policy)
        with open_on(server, ttl_s=ttl_s) as storage:
            assert retention is storage.capabilities.retention

    def test_a_full_server_refuses_and_recovers(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        large = space(page_nbytes=MIB)
        with client_of_one(server) as admin:
            admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 6 * MIB)
        verdicts = storage.batch_set(large, hashes_of(12), pages_of(12, MIB))
        taken = [one for one, ok in zip(hashes_of(12), verdicts, strict=True) if ok]

        assert 0 < len(taken) < 12
        assert verdicts == storage.batch_exists(large, hashes_of(12))
        assert 12 - len(taken) == storage.stats().counters["refused_no_space"]
        assert len(taken) == len(must_get(storage, large, taken))
        assert [True] * 12 == storage.batch_delete(large, hashes_of(12))
        wait_until(lambda: storage.batch_set(large, [hash_of(99)], [page(MIB)]) == [True])


class TestCosts:
    def test_round_trips_do_not_grow_with_a_batch(self, server: RedisServer) -> None:
        small = space(page_nbytes=64)
        with FaultProxy(("127.0.0.1", server.port)) as proxy:
            url = f"redis://127.0.0.1:{proxy.address[1]}"
            with open_on(server, url=url) as storage:
                storage.open_space(small)
                turns = [proxy.turns]

                def took() -> int:
                    turns.append(proxy.turns)
                    return turns[-1] - turns[-2]

                storage.batch_exists(small, hashes_of(1000))
                assert took() <= 4  # the first replies come while the last requests go
                storage.batch_set(small, hashes_of(1000), pages_of(1000, 64))
                assert took() <= 10
                storage.batch_get(small, hashes_of(1000), [blank(64) for _ in range(1000)])
                assert took() <= 10
                storage.batch_delete(small, hashes_of(1000))
                assert took() <= 8

    def test_a_page_that_is_there_is_not_sent_again(self, server: RedisServer) -> None:
        large = space(page_nbytes=MIB)
        with FaultProxy(("127.0.0.1", server.port)) as proxy:
            url = f"redis://127.0.0.1:{proxy.address[1]}"
            with open_on(server, url=url) as storage:
                storage.batch_set(large, hashes_of(4), pages_of(4, MIB))
                before = proxy.bytes_up
                assert [True] * 4 == storage.batch_set(large, hashes_of(4), pages_of(4, MIB))
                assert proxy.bytes_up - before < 1000

    @pytest.mark.parametrize("segments", [1, 64])
    def test_no_copy_of_a_page_is_made(self, storage: RedisStorage, segments: int) -> None:
        large = space(page_nbytes=4 * MIB)
        hashes, pages = hashes_of(8), [in_segments(page(4 * MIB, n), segments) for n in range(8)]
        for call in (storage.batch_set, storage.batch_get):
            call(large, hashes[:1], pages[:1])  # what is imported or made at the first call
            tracemalloc.start()
            call(large, hashes, pages)
            peak_nbytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()

            assert peak_nbytes < 512 << 10

    def test_pages_larger_than_all_buffers_pass(self, storage: RedisStorage) -> None:
        huge = space(page_nbytes=24 * MIB)
        pages = pages_of(6, 24 * MIB)

        assert [True] * 6 == storage.batch_set(huge, hashes_of(6), pages)
        assert [one.tobytes() for one in pages] == must_get(storage, huge, hashes_of(6))


def in_segments(whole: Page, count: int) -> Page:
    (view,) = whole.segments
    step = view.nbytes // count
    return Page(*(view[start : start + step] for start in range(0, view.nbytes, step)))


# The index of the redis backend, while others set and remove the same pages.

SPACE = space(page_nbytes=64)
KEYS = SpaceKeys(PREFIX, SPACE.id)
BUCKET_MATES = ["ab" + hash_of(number)[2:] for number in range(2)]
HASHES = [*BUCKET_MATES, "cd" + hash_of(2)[2:]]
PAGES = [page(64, seed) for seed in range(3)]


@pytest.fixture
def remover(server: RedisServer) -> Iterator[RedisStorage]:
    with open_on(server) as storage:
        storage.open_space(SPACE)
        yield storage


@pytest.fixture
def writer(server: RedisServer) -> Iterator[RedisStorage]:
    with open_on(server) as storage:
        storage.open_space(SPACE)
        yield storage


def present(storage: RedisStorage) -> set[str]:
    verdicts = storage.batch_exists(SPACE, HASHES)
    return {one for one, there in zip(HASHES, verdicts, strict=True) if there}


def listed(storage: RedisStorage) -> set[str]:
    return {info.page_hash for info in storage.scan(SPACE)}


@contextmanager
def between_commands(at: int, act: Callable[[], None]) -> Generator[list[int], None, None]:
    """Send commands one by one, and call `act` before command `at`. Yield the count of all commands."""
    module: Any = batch
    execute, get_lengths = Connection.execute, module.get_lengths
    sent = [0]

    def send(
        call: Callable[[Any, Any], list[Any]], place: Any, commands: Sequence[Any]
    ) -> list[Any]:
        replies: list[Any] = []
        for command in commands:
            if sent[0] == at:
                patches.undo()
                act()
                patch()
            sent[0] += 1
            replies += call(place, [command])
        return replies

    def one_by_one(connection: Connection, commands: Sequence[Any]) -> list[Any]:
        return send(execute, connection, commands)

    def patch() -> None:
        patches.setattr(Connection, "execute", one_by_one)
        patches.setattr(module, "get_lengths", partial(send, get_lengths))

    with pytest.MonkeyPatch.context() as patches:
        patch()
        yield sent


def set_all(storage: RedisStorage) -> None:
    assert [True] * 3 == storage.batch_set(SPACE, HASHES, PAGES)


class TestDelete:
    def test_a_set_between_any_two_of_its_commands_leaves_no_page_unlisted(
        self, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        at, steps = 0, 1
        while at < steps:
            set_all(writer)
            with between_commands(at, lambda: set_all(writer)) as sent:
                assert [True] * 3 == remover.batch_delete(SPACE, HASHES)
            steps = sent[0]
            assert present(writer) <= listed(writer), f"a set before command {at} of {steps}"
            remover.batch_delete(SPACE, HASHES)
            at += 1
        assert steps >= 7  # marks, pages, members

    def test_a_remover_that_dies_between_any_two_of_its_commands_leaves_no_page_unlisted(
        self, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        class Death(BaseException):
            pass

        def die() -> None:
            raise Death

        at, is_over = 0, False
        while not is_over:
            set_all(writer)
            with between_commands(at, die):
                try:
                    remover.batch_delete(SPACE, HASHES)
                    is_over = True
                except Death:
                    assert present(writer) <= listed(writer), f"died before command {at}"
            at += 1
        assert at > 7

    def test_a_deleted_page_leaves_nothing(
        self, server: RedisServer, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        set_all(writer)
        remover.batch_delete(SPACE, [*HASHES, *HASHES])

        assert [f"{PREFIX}spaces".encode()] == client_of_one(server).keys("*")

    def test_a_page_that_the_server_does_not_remove_stays_listed(
        self, server: RedisServer, writer: RedisStorage
    ) -> None:
        """The deleting storage logs in as a user who may change indexes, but may not remove keys."""
        admin = client_of_one(server)
        admin.acl_setuser(
            "half", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-unlink", "-del"]
        )
        set_all(writer)
        try:
            with (
                open_on(server, username="half", password="any") as half,  # noqa: S106
                pytest.raises(StorageUnavailable, match="NOPERM"),
            ):
                half.batch_delete(SPACE, HASHES)
        finally:
            admin.acl_deluser("half")

        assert set(HASHES) == present(writer) == listed(writer)

    def test_a_full_server_deletes_pages_and_members(
        self, server: RedisServer, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        """A full server accepts no marks of the delete. It has memory again when the pages are gone."""
        large = space(page_nbytes=1 << 20)
        writer.batch_set(large, HASHES, [page(1 << 20, seed) for seed in range(3)])
        admin = client_of_one(server)
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] - (1 << 20))

        assert [True] * 3 == remover.batch_delete(large, HASHES)

        assert [f"{PREFIX}spaces".encode()] == admin.keys("*")


class TestScan:
    def test_a_set_between_any_two_of_its_commands_leaves_no_page_unlisted(
        self,
        server: RedisServer,
        remover: RedisStorage,
        writer: RedisStorage,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The scan finds index members without pages, as expiry or a full server leaves behind."""
        monkeypatch.setattr("hicache_backends.redis.index.BUCKETS", ("ab", "cd"))
        admin = client_of_one(server)
        at, steps = 0, 1
        while at < steps:
            set_all(writer)
            admin.unlink(*KEYS.pages(HASHES))
            with between_commands(at, lambda: set_all(writer)) as sent:
                list(remover.scan(SPACE))
            steps = sent[0]
            assert present(writer) <= listed(writer), f"a set before command {at} of {steps}"
            remover.batch_delete(SPACE, HASHES)
            at += 1
        assert steps >= 10  # facts, members, lengths, marks, lengths again, members

    def test_members_without_pages_are_removed(
        self, server: RedisServer, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        set_all(writer)
        admin = client_of_one(server)
        admin.unlink(KEYS.page(HASHES[0]), KEYS.page(HASHES[2]))

        assert {HASHES[1]} == listed(remover)
        assert [HASHES[1].encode()] == admin.zrange(KEYS.index("ab"), 0, -1)
        assert 0 == admin.exists(KEYS.index("cd"))

    def test_members_that_are_no_page_hash_are_neither_listed_nor_removed(
        self, server: RedisServer, remover: RedisStorage, writer: RedisStorage
    ) -> None:
        set_all(writer)
        admin = client_of_one(server)
        odd = HASHES[0][:33]
        foreign = [b"\xff\xfe", b"ab}x", b"cd" + HASHES[0][2:].encode(), odd.encode()]
        admin.set(KEYS.page(odd), b"x")
        admin.zadd(KEYS.index("ab"), dict.fromkeys(foreign, 1.0))

        assert set(HASHES) == listed(remover)
        assert 3 == remover.clear(SPACE)
        assert sorted(foreign) == sorted(admin.zrange(KEYS.index("ab"), 0, -1))


class TestExpiry:
    def test_a_shorter_life_elsewhere_takes_no_page_out_of_its_index(
        self, server: RedisServer, writer: RedisStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two writers set a page at once. One gives it an expiry time, the other keeps it forever."""
        monkeypatch.setattr("hicache_backends.redis.index._TRIM_SHARE", 1.0)
        monkeypatch.setattr("hicache_backends.redis.index._CLOCK_SKEW_S", -3600.0)
        batch_module: Any = batch
        set_pages = batch_module.set_pages

        def late(*arguments: Any) -> None:
            monkeypatch.setattr(batch, "set_pages", set_pages)
            set_all(writer)
            set_pages(*arguments)

        with open_on(server, ttl_s=60) as expiring:
            expiring.open_space(SPACE)
            monkeypatch.setattr(batch, "set_pages", late)
            expiring.batch_set(SPACE, HASHES, PAGES)  # which trims
            assert batch_module.set_pages is set_pages

            assert -1 == client_of_one(server).ttl(KEYS.page(HASHES[0]))
            assert set(HASHES) == listed(expiring)

    def test_trimming_leaves_members_that_a_remover_has_marked(
        self, server: RedisServer, writer: RedisStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The process that marked the members has died before it removed their pages."""
        monkeypatch.setattr("hicache_backends.redis.index._TRIM_SHARE", 1.0)
        set_all(writer)
        admin = client_of_one(server)
        admin.zadd(KEYS.index("ab"), dict.fromkeys(BUCKET_MATES, -(1 << 51)))
        with open_on(server, ttl_s=60) as expiring:
            expiring.batch_set(SPACE, HASHES, PAGES)

        assert set(HASHES) == listed(writer)


def test_a_writer_of_many_key_spaces_registers_a_forgotten_one_again(
    server: RedisServer,
    remover: RedisStorage,
    writer: RedisStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hicache_backends.redis.index._MOST_SPACES", 1)
    writer.open_space(space(page_nbytes=128))
    remover.remove_space(SPACE.id)

    writer.batch_set(SPACE, HASHES[:1], PAGES[:1])

    with open_on(server) as other:
        assert SPACE in set(other.spaces())


# The fields of INFO that matter to an operator become facts with advice.


@pytest.mark.parametrize(
    ("info", "topic", "words"),
    [
        ("", "server", "INFO is forbidden"),
        ("redis_version:7.2.4\nrole:slave", "server", "refuses writes"),
        ("redis_version:8.0.0\nvalkey_version:8.1.0\nrole:master", "server", "Valkey 8.1.0"),
        ("role:master\naof_last_write_status:err", "persistence", "failed: aof_last_write_status"),
        ("role:master\nserver_time_usec:1000000", "clock", "synchronize both clocks with NTP"),
    ],
)
def test_what_a_redis_says_is_understood(info: str, topic: str, words: str) -> None:
    found = {one.topic: f"{one.fact} {one.advice}" for one in diagnoses(info)}

    assert words in found[topic]


@pytest.mark.parametrize(
    ("policy", "ttl_s", "advice"),
    [
        ("noeviction", None, "set ttl_s, and maxmemory-policy volatile-ttl,"),
        ("allkeys-lru", None, "set ttl_s, and maxmemory-policy volatile-ttl,"),
        ("volatile-ttl", None, "set ttl_s"),
        ("volatile-ttl", 60.0, ""),
    ],
)
def test_each_policy_gets_the_advice_of_the_documents(
    policy: str, ttl_s: float | None, advice: str
) -> None:
    found = _eviction(f"maxmemory:1000\nmaxmemory_policy:{policy}", ttl_s=ttl_s)

    assert advice in found.advice
    assert bool(advice) == bool(found.advice)
    assert "`volatile-ttl` with `ttl_s`" in (ROOT / "docs/backends/redis.md").read_text()


@pytest.mark.parametrize(
    ("used", "is_full"), [(100 << 20, True), (96 << 20, True), (90 << 20, False), (0, False)]
)
def test_a_server_near_its_limit_is_full(used: int, is_full: bool) -> None:  # noqa: FBT001
    found = _eviction(f"maxmemory:{100 << 20}\nmaxmemory_policy:allkeys-lru\nused_memory:{used}")

    assert is_full is found.is_full


def _eviction(info: str, *, ttl_s: float | None = None) -> Diagnosis:
    (found,) = (one for one in diagnoses(info, ttl_s=ttl_s) if one.topic == "eviction")
    return found


@pytest.mark.usefixtures("transport")
def test_after_pages_were_revoked_at_any_moment_the_next_call_works(storage: RedisStorage) -> None:
    large = space(page_nbytes=1 << 20)
    storage.open_space(large)
    hashes = [hash_of(number) for number in range(8)]
    sound = [page(1 << 20, number) for number in range(8)]
    for attempt in range(12):
        revocable = AtomicRevocable()
        lent = [lent_page(1 << 20, number, revocable) for number in range(8)]
        moving = threading.Thread(
            target=storage.batch_get if attempt % 2 else storage.batch_set,
            args=(large, hashes, lent),
        )
        moving.start()
        time.sleep(attempt / 3000)
        revocable.revoke()
        for one in lent:
            one.copy_from(b"\xff" * (1 << 20))
        moving.join()

        assert {b"\xff" * (1 << 20)} == {one.tobytes() for one in lent}
        assert [True] * 8 == storage.batch_set(large, hashes, sound)
        found = [Page(bytearray(1 << 20)) for _ in hashes]
        assert [True] * 8 == storage.batch_get(large, hashes, found)
        assert [one.tobytes() for one in sound] == [one.tobytes() for one in found]
        if attempt % 2:
            storage.batch_delete(large, hashes)
    assert "failed_connections" not in storage.stats().counters
