"""Connections of the redis backend: reuse, forks, closing, and servers that refuse."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from typing import Any

import pytest
from hicache_backends.redis import RedisStorage
from pages import hash_of, page, space
from redis.exceptions import BusyLoadingError
from redis_servers import PREFIX, client_of_one, config_of, hashes_of, must_get, open_on, pages_of
from servers import ROOT, RedisServer, TlsRedisServer, wait_until

from hicache_storage import ConfigError, StorageClosed, StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline


class TestConnections:
    def test_a_unix_socket_works(self, server: RedisServer) -> None:
        with open_on(server, url=f"unix://{server.socket_path}") as storage:
            storage.batch_set(space(), [hash_of(1)], [page()])

            assert [page().tobytes()] == must_get(storage, space(), [hash_of(1)])

    def test_databases_are_apart(self, server: RedisServer, storage: RedisStorage) -> None:
        storage.batch_set(space(), [hash_of(1)], [page()])
        with open_on(server, url=server.url.removesuffix("/0") + "/1") as other:
            assert [False] == other.batch_exists(space(), [hash_of(1)])

    def test_connections_that_the_server_ended_are_made_again(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), [hash_of(1)], [page()])
        with client_of_one(server) as admin:
            admin.client_kill_filter(_type="normal", skipme=True)

        assert [True] == storage.batch_exists(space(), [hash_of(1)])

    def test_a_forked_child_uses_connections_of_its_own(
        self, server: RedisServer, storage: RedisStorage
    ) -> None:
        storage.batch_set(space(), hashes_of(20), pages_of(20))
        context = multiprocessing.get_context("fork")
        wrong = context.Value("i", -1)
        child = context.Process(target=_read_all, args=(storage, wrong))
        child.start()
        for _ in range(50):
            must_get(storage, space(), hashes_of(20))
        child.join(30)

        assert (0, 0) == (child.exitcode, wrong.value)
        assert 20 == len(must_get(storage, space(), hashes_of(20)))

    def test_close_ends_a_call_that_waits(self, server: RedisServer) -> None:
        storage = open_on(server)
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                storage.batch_exists(space(), [hash_of(1)])
            except StorageClosed as error:
                raised.append(error)

        server.pause()
        try:
            waiting = threading.Thread(target=wait)
            waiting.start()
            wait_until(lambda: any(pools_in_use(storage)))
            storage.close()
            waiting.join(10)
        finally:
            server.resume()

        assert 1 == len(raised)

    def test_a_call_that_finds_all_connections_in_use_waits_no_longer_than_it_may(
        self, server: RedisServer
    ) -> None:
        with open_on(server, parallelism=1, timeout_s=1) as storage:
            ((pool,),) = [list(storage._sessions.get().pools._pools.values())]
            held = [pool.acquire(Deadline(5)) for _ in range(2)]
            with held[0], held[1], pytest.raises(StorageTimeout):
                storage.batch_exists(space(), [hash_of(1)])


def pools_in_use(storage: RedisStorage) -> list[bool]:
    pools = storage._sessions.get().pools._pools.values()
    return [bool(pool._busy) for pool in pools]


def _read_all(storage: RedisStorage, wrong: Any) -> None:
    expected = [one.tobytes() for one in pages_of(20)]
    found = [must_get(storage, space(), hashes_of(20)) for _ in range(50)]
    wrong.value = sum(one != expected for one in found)
    os._exit(0)


class TestRefusals:
    def test_a_missing_password_is_named(self, tmp_path: Any) -> None:
        with RedisServer(tmp_path, "--requirepass", "open sesame") as server:
            with pytest.raises(ConfigError, match="asks for one, but none is given"):
                open_on(server)
            with open_on(server, password="open sesame") as storage:  # noqa: S106
                assert [False] == storage.batch_exists(space(), [hash_of(1)])

    def test_a_wrong_password_is_named_and_not_repeated(self, tmp_path: Any) -> None:
        with TlsRedisServer(tmp_path) as server:
            with pytest.raises(ConfigError, match="password") as raised:
                open_on(server, password="hunter2")  # noqa: S106
            assert "hunter2" not in str(raised.value)

    def test_a_certificate_of_nobody_is_not_trusted(self, tmp_path: Any) -> None:
        with TlsRedisServer(tmp_path) as server:
            config = config_of(server)
            del config["tls_ca_file"]
            with pytest.raises(StorageUnavailable, match="certificate"):
                RedisStorage.from_config(config)
            with RedisStorage.from_config({**config, "tls_verify": False}) as storage:
                assert [False] == storage.batch_exists(space(), [hash_of(1)])

    def test_a_replica_does_not_take_pages(self, server: RedisServer, tmp_path: Any) -> None:
        of = f"127.0.0.1 {server.port}"
        with RedisServer(tmp_path, "--replicaof", of) as replica, open_on(replica) as storage:  # noqa: SIM117
            with pytest.raises(StorageUnavailable, match="READONLY"):
                storage.batch_set(space(), [hash_of(1)], [page()])

    def test_a_server_that_loads_its_dump_is_unavailable_until_it_has(self, tmp_path: Any) -> None:
        with RedisServer(tmp_path) as server:
            with open_on(server) as storage, client_of_one(server) as admin:
                storage.batch_set(space(), hashes_of(200), pages_of(200))
                admin.save()
            server.stop()
            slowly = "--key-load-delay 5000 --loading-process-events-interval-bytes 1024"
            server.options = tuple(slowly.split())
            server.start()
            with open_on(server) as storage, client_of_one(server) as admin:
                with pytest.raises(StorageUnavailable, match=r"[Ll]oading"):
                    storage.batch_exists(space(), hashes_of(200))
                wait_until(lambda: not _is_loading(admin))
                assert 200 == len(must_get(storage, space(), hashes_of(200)))

    def test_the_rights_that_the_documentation_names_are_enough(self, server: RedisServer) -> None:
        text = (ROOT / "docs/backends/redis.md").read_text()
        (rights,) = re.findall(r"`(~hicache:\* [^`]*)`", text)
        with client_of_one(server) as admin:
            command = f"ACL SETUSER cache reset on nopass {rights}"
            admin.execute_command(*command.replace("hicache:", PREFIX).replace("\\", "").split())
        with open_on(server, username="cache", password="any", ttl_s=60) as storage:  # noqa: S106
            assert [True] * 50 == storage.batch_set(space(), hashes_of(50), pages_of(50))
            assert 50 == len(must_get(storage, space(), hashes_of(50)))
            assert [space()] == list(storage.spaces())
            assert 50 == len(list(storage.scan(space())))
            with client_of_one(server) as admin:
                admin.config_set("maxmemory-policy", "allkeys-lru")
            assert 50 == storage.clear(space())

    def test_commands_that_are_forbidden_are_named(self, server: RedisServer) -> None:
        with client_of_one(server) as admin:
            rights = "on nopass ~* +@read +info"
            admin.execute_command("ACL", "SETUSER", "reader", *rights.split())
        with open_on(server, username="reader", password="any") as storage:  # noqa: S106
            assert [False] == storage.batch_exists(space(), [hash_of(1)])
            with pytest.raises(StorageUnavailable, match="NOPERM"):
                storage.open_space(space())


def _is_loading(admin: Any) -> bool:
    try:
        return bool(admin.info("persistence")["loading"])
    except BusyLoadingError:
        return True
