"""The index of the redis backend, while others set and remove the same pages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.redis import RedisStorage, batch
from hicache_backends.redis.connection import Connection
from hicache_backends.redis.layout import SpaceKeys
from pages import hash_of, page, space
from redis_servers import PREFIX, client_of_one, open_on

from hicache_storage import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from servers import RedisServer

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
    connection_class: Any = Connection
    execute = connection_class.execute
    sent = [0]

    def one_by_one(connection: Connection, commands: Sequence[Any]) -> list[Any]:
        replies: list[Any] = []
        for command in commands:
            if sent[0] == at:
                connection_class.execute = execute
                act()
                connection_class.execute = one_by_one
            sent[0] += 1
            replies += execute(connection, [command])
        return replies

    connection_class.execute = one_by_one
    try:
        yield sent
    finally:
        connection_class.execute = execute


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
        """The remover's user may change indices, but may not remove keys."""
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
        """A full server takes no marks. It has memory again when the pages are gone."""
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
        """The scan finds members without pages, as expiry or a full server leaves them."""
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
        """Two writers set one page at once. The first of them keeps pages for ever."""
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
        """The remover has died before it removed its pages."""
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
