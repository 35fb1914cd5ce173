"""A read-only storage changes nothing in Redis, and a key space is removed with its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.redis import RedisStorage
from hicache_backends.redis.index import Index
from hicache_backends.redis.layout import SpaceKeys, registry
from pages import blank, hash_of, space
from redis_servers import PREFIX, Kind, client_of_one, config_of, hashes_of, open_on, pages_of
from servers import RedisServer, ValkeyServer, wait_until

from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage, PageFault, UnreadableKind, UnreadableSpace

SPACE, LOST, DAMAGED = space(), space(model="lost"), space(model="damaged")
HASHES = hashes_of(8)
KEYS = SpaceKeys(PREFIX, SPACE.id)
STRANGER = f"{PREFIX}{{{SPACE.id}:ab}}no-hash".encode()
SHORT, LONG, LIST, GONE = HASHES[:4]
FAULTS = {
    PageFault(SHORT, "wrong_size", "it is 5 bytes long instead of 4,096"),
    PageFault(LONG, "wrong_size", "it is 4,097 bytes long instead of 4,096"),
    PageFault(LIST, "wrong_size", "its value is not a string"),
}
UNREADABLE = {
    UnreadableSpace(LOST.id, UnreadableKind.DAMAGED, "its manifest is lost"),
    UnreadableSpace(DAMAGED.id, UnreadableKind.DAMAGED, "its manifest is damaged"),
}
POLICIES = ("noeviction", "allkeys-lru", "volatile-ttl")


def fill(storage: RedisStorage, admin: Any) -> None:
    """Store pages, damage some pages and two manifests, and add foreign keys."""
    for one in (SPACE, LOST, DAMAGED):
        storage.open_space(one)
        assert all(storage.batch_set(one, HASHES, pages_of(len(HASHES))))
    admin.set(KEYS.page(SHORT), b"short")
    admin.append(KEYS.page(LONG), b"!")
    admin.delete(KEYS.page(LIST), KEYS.page(GONE))
    admin.lpush(KEYS.page(LIST), "a list")
    admin.zadd(KEYS.index("ab"), {"of another program": 1.0})
    admin.hdel(registry(PREFIX), LOST.id)
    admin.hset(registry(PREFIX), DAMAGED.id, '{"model": "dam')
    admin.hset(registry(PREFIX), "of another program", "x")
    admin.set(STRANGER, "x")
    admin.set(f"{PREFIX}{{{'0' * 32}:ab}}{hash_of(1)}", "x")  # in a bucket of another hash
    admin.set("of another program", "x", ex=1000)


def look(storage: HiCacheStorage) -> None:
    """Make every call of a program that only looks."""
    storage.open_space(space(model="other"))
    assert {SPACE} == set(storage.spaces())
    assert set(HASHES[4:]) == {info.page_hash for info in storage.scan(SPACE)}
    assert FAULTS == set(storage.faults(SPACE))
    assert FAULTS == set(storage.faults(SPACE, HASHES))
    assert UNREADABLE == set(storage.unreadable_spaces())
    assert [False] * 4 + [True] * 4 == storage.batch_exists(SPACE, HASHES)
    pages = [blank() for _ in HASHES]
    assert [False] * 4 + [True] * 4 == storage.batch_get(SPACE, HASHES, pages)
    storage.page_times(SPACE, HASHES)
    storage.diagnose()
    storage.stats()


def contents(admin: Any) -> dict[bytes, tuple[bytes, bool]]:
    """Return each key with its value, and whether it expires."""
    return {key: (admin.dump(key), admin.ttl(key) >= 0) for key in admin.keys("*")}


def idle_s(admin: Any) -> dict[bytes, int]:
    return {key: admin.object("idletime", key) for key in admin.keys("*")}


@pytest.fixture(scope="module", params=[Kind("redis", RedisServer), Kind("valkey", ValkeyServer)])
def each(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    with request.param.start(tmp_path_factory.mktemp("each")) as server:
        yield server


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_changes_no_key(each: RedisServer, policy: str) -> None:
    with client_of_one(each) as admin:
        admin.flushall()
        admin.config_set("maxmemory-policy", policy)
        with open_on(each) as storage:
            fill(storage, admin)
        before = contents(admin)

        config = {**config_of(each), "prefix": PREFIX}
        with open_storage("redis", config, read_only=True) as storage:
            look(storage)

        assert before == contents(admin)


def test_looking_is_no_use_where_the_server_can_tell(each: RedisServer) -> None:
    """A read is not a use if the server has CLIENT NO-TOUCH, which Redis before 7.2 lacks."""
    with client_of_one(each) as admin:
        if b"no-touch" not in b" ".join(admin.execute_command("CLIENT", "HELP")).lower():
            pytest.skip("the server counts every read as a use")
        admin.flushall()
        admin.config_set("maxmemory-policy", "allkeys-lru")
        with open_on(each) as storage:
            fill(storage, admin)
        wait_until(lambda: min(idle_s(admin).values()) >= 2)

        config = {**config_of(each), "prefix": PREFIX}
        with open_storage("redis", config, read_only=True) as storage:
            look(storage)

        assert min(idle_s(admin).values()) >= 2


def test_a_user_who_may_not_walk_is_told_that_nobody_looked_for_unreadable_key_spaces(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of_one(server) as admin, open_on(server) as storage:
        fill(storage, admin)
        admin.execute_command("ACL", "SETUSER", "bank", "on", ">pw", "~*", "+@all", "-scan")
        config = {**config_of(server), "prefix": PREFIX, "username": "bank", "password": "pw"}

        with open_storage("redis", config, read_only=True) as opened:
            assert [] == list(opened.unreadable_spaces())
            assert {SPACE} == set(opened.spaces())
    assert "key spaces that cannot be read were not looked for" in caplog.text


class TestRemoveSpace:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("removed", [SPACE, LOST, DAMAGED], ids=["whole", "lost", "damaged"])
    def test_pages_members_and_manifest_go_and_nothing_else(
        self, server: RedisServer, storage: RedisStorage, policy: str, removed: Any
    ) -> None:
        with client_of_one(server) as admin:
            admin.config_set("maxmemory-policy", policy)
            fill(storage, admin)
            admin.zrem(KEYS.index("ab"), "of another program")
            before = contents(admin)
            pages = 4 if removed is SPACE else len(HASHES)

            assert pages == storage.remove_space(removed.id)
            assert 0 == storage.remove_space(removed.id)

            ours = f"{PREFIX}{{{removed.id}:".encode()
            left = {key for key in before if not key.startswith(ours) or key == STRANGER}
            assert left == contents(admin).keys()
            assert removed.id.encode() not in admin.hkeys(registry(PREFIX))
            assert removed not in set(storage.spaces())

    @pytest.mark.parametrize("space_id", ["", "x", "0" * 32, "*"])
    def test_an_unknown_one_has_no_pages(self, storage: RedisStorage, space_id: str) -> None:
        assert 0 == storage.remove_space(space_id)

    @pytest.mark.parametrize("is_early", [True, False])
    def test_one_that_is_written_to_meanwhile_stays_with_its_manifest(
        self,
        server: RedisServer,
        storage: RedisStorage,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_early: bool,
    ) -> None:
        """The manifest stays if the page is set early in the removal, and is restored if late."""
        execute, everything = Index._execute, Index._everything
        storage.open_space(SPACE)
        storage.batch_set(SPACE, HASHES, pages_of(len(HASHES)))

        def and_then_set(index: Index, keys: SpaceKeys, *, walks: bool) -> Iterator[Any]:
            yield from everything(index, keys, walks=walks)
            writer.batch_set(SPACE, [late], pages_of(1))

        def set_after_removal(index: Index, commands: Sequence[Any], deadline: Any) -> Any:
            replies = execute(index, commands, deadline)
            if any(command[0] == "HDEL" for command in commands):
                writer.batch_set(SPACE, [late], pages_of(1))
            return replies

        late = hash_of(99)
        with open_on(server) as writer:
            writer.open_space(SPACE)
            if is_early:
                monkeypatch.setattr(Index, "_everything", and_then_set)
            else:
                monkeypatch.setattr(Index, "_execute", set_after_removal)

            assert len(HASHES) == storage.remove_space(SPACE.id)
            assert [SPACE] == list(storage.spaces())
            assert [late] == [info.page_hash for info in storage.scan(SPACE)]


def test_a_full_server_is_said_to_be_full(tmp_path: Path) -> None:
    with RedisServer(tmp_path, "--maxmemory", "4mb") as server, open_on(server) as storage:
        assert not any(one.is_full for one in storage.diagnose())
        storage.batch_set(SPACE, hashes_of(1000), pages_of(1000))

        assert any(one.is_full for one in storage.diagnose())
