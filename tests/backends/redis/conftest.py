"""Fixtures of the tests of `redis`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hicache_backends.redis import RedisStorage
from redis_servers import client_of_one, open_on
from servers import RedisServer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    options = ("--enable-debug-command", "local")
    with RedisServer(tmp_path_factory.mktemp("redis"), *options) as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    """Return an empty server."""
    with client_of_one(shared) as admin:
        admin.flushall()
        admin.config_set("maxmemory", 0)
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_resetstat()
    return shared


@pytest.fixture
def storage(server: RedisServer) -> Iterator[RedisStorage]:
    with open_on(server) as storage:
        yield storage
