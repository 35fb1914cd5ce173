"""Fixtures for the tests of the index in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hf3fs_redis import opened
from hicache_backends.hf3fs import Hf3fsStorage
from servers import RedisServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def storage(server: RedisServer, tmp_path: Path) -> Iterator[Hf3fsStorage]:
    with opened(server, tmp_path) as storage:
        yield storage
