"""A store that hangs, below SGLang's controller and its radix tree with `wait_complete`."""

from __future__ import annotations

import time
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lateness import must_be_within, tried_again_if_late
from servers import RedisServer, wait_until
from sglang_engine import TOKENS, Engine, PoolName, PoolPlan, engine_world
from sglang_radix import Server, server_world

PROBES_S = 8.0
"""The time between two probes that the breaker lets through, and a little more."""
_prefixes = count()


@pytest.fixture
def redis(tmp_path: Path) -> Generator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server
        server.resume()


def config_of(redis: RedisServer, file_config: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{next(_prefixes)}:"  # a test that is tried again begins without pages
    config = {**file_config, "backend_name": "redis", "url": redis.url, "prefix": prefix}
    del config["path"]
    return config


def wait_of(server: Server, first: int) -> float:
    """Return for how many seconds a request with an unknown prompt waits."""
    began_s = time.monotonic()
    assert server.load_prefix([first, *TOKENS[1:]])[0] == 0
    return time.monotonic() - began_s


@tried_again_if_late
def test_requests_wait_for_a_store_that_hangs_for_two_seconds_once(
    redis: RedisServer, file_config: dict[str, Any]
) -> None:
    with server_world(config_of(redis, file_config)), Server() as warm, Server() as cold:
        computed = warm.compute(TOKENS)
        redis.pause()

        first_s = wait_of(cold, 10_000)
        end_s, later_s = time.monotonic() + PROBES_S, list[float]()
        while time.monotonic() < end_s:
            later_s.append(wait_of(cold, 10_001 + len(later_s)))
            time.sleep(0.05)  # as requests come

        redis.resume()
        wait_until(lambda: cold.load_prefix(TOKENS) == (len(TOKENS), computed))
    must_be_within(first_s, 4, least_s=1.5)
    must_be_within(max(later_s), 1.5)


@pytest.mark.parametrize("own", [{}, {"timeout_s": 60}], ids=["by default", "beyond it"])
def test_a_call_ends_at_the_adapters_deadline_whatever_that_of_the_store(
    own: dict[str, Any], redis: RedisServer, file_config: dict[str, Any]
) -> None:
    config = {**config_of(redis, file_config), **own, "adapter": {"timeout_s": 1}}
    with engine_world(), Engine([PoolPlan()], config) as engine:
        written = engine.write(TOKENS)
        redis.pause()
        began_s = time.monotonic()

        places = written.places[PoolName.KV]
        assert engine.storage.batch_get_v1(written.hashes, places) == [False] * 8

        assert time.monotonic() - began_s < 5
        redis.resume()


def test_a_flush_ends_while_a_store_hangs(redis: RedisServer, file_config: dict[str, Any]) -> None:
    """A flush joins each storage thread for 10 s, and ends the server if a thread is still busy."""
    with server_world(config_of(redis, file_config)), Server() as server:
        server.compute(TOKENS)
        redis.pause()
        for first in range(10_000, 10_004):
            server.begin_prefetch([first, *TOKENS[1:]])
        began_s = time.monotonic()

        server.cache.reset()

        assert time.monotonic() - began_s < 8
