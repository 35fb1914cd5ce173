"""Look-ups of server names have a time limit, and every address of a name is tried."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from clocks import Stopwatch
from hicache_backends.redis import RedisStorage
from name_servers import Names, look_ups
from pages import hash_of, space
from redis_servers import RespServer, empty_reply, unreachable_port
from servers import wait_until

from hicache_storage import StorageTimeout, StorageUnavailable
from hicache_storage.backend_support.resolver import Resolver

LIMIT_S = 0.4
LATE_S = LIMIT_S + 1.0
SPACE = space()


def took_s(config: dict[str, Any]) -> float:
    """Return the time after which a server counts as unreachable, as a `Stopwatch` does."""
    watch = Stopwatch()
    with pytest.raises((StorageTimeout, StorageUnavailable)):
        RedisStorage.from_config(config)
    return watch.so_far_s()


@pytest.fixture
def server() -> Iterator[RespServer]:
    with RespServer(empty_reply) as server:
        yield server


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names()
    resolver = Resolver()
    monkeypatch.setattr("hicache_backends.redis.connection.RESOLVER", resolver)
    monkeypatch.setattr(socket, "getaddrinfo", made.look_up)
    yield made
    made.answers.set()
    wait_until(lambda: not look_ups())


class TestNames:
    def test_a_name_server_that_hangs_takes_no_longer_than_the_call(self, names: Names) -> None:
        names.answers.clear()
        config = {"url": "redis://cache.example", "timeout_s": LIMIT_S}

        with pytest.raises(StorageTimeout, match=r"look-up of host 'cache\.example'"):
            RedisStorage.from_config(config)
        assert took_s(config) < LATE_S

    def test_one_look_up_at_most_is_under_way_for_a_name(self, names: Names) -> None:
        names.answers.clear()
        config = {"url": "redis://cache.example", "timeout_s": 0.05}
        for _ in range(5):
            took_s(config)

        assert 1 == len(look_ups())

    def test_old_addresses_are_used_while_it_hangs(self, names: Names, server: RespServer) -> None:
        url = f"redis://cache.example:{server.port}"
        with RedisStorage.from_config({"url": url, "timeout_s": 10}) as storage:
            names.answers.clear()
            server.answer = lambda command: b"-LOADING\r\n"
            with pytest.raises(StorageUnavailable):
                storage.batch_exists(SPACE, [hash_of(1)])  # which ends all connections
            server.answer = empty_reply

            assert [False] == storage.batch_exists(SPACE, [hash_of(1)])
            assert 1 == len(look_ups())


class TestAddresses:
    def test_all_of_a_name_share_the_time_of_the_call(self, names: Names) -> None:
        names.hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        with unreachable_port(*names.hosts) as port:
            config = {"url": f"redis://cache.example:{port}", "timeout_s": LIMIT_S}

            with pytest.raises(StorageTimeout, match="connecting to cache"):
                RedisStorage.from_config(config)
            assert took_s(config) < LATE_S

    def test_one_that_does_not_answer_leaves_time_for_the_next(
        self, names: Names, server: RespServer
    ) -> None:
        names.hosts = ["127.0.0.2", "127.0.0.1"]
        with ExitStack() as stack:
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.2", server.port))
            taken.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.2", server.port))
            url = f"redis://cache.example:{server.port}"
            with RedisStorage.from_config({"url": url, "timeout_s": 4}) as storage:
                assert [False] == storage.batch_exists(SPACE, [hash_of(1)])
