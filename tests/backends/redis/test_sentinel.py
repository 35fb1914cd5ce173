"""The redis backend behind sentinels that fail, or that know no master that is up."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from hicache_backends.redis import RedisStorage
from redis_servers import RespServer, array, bulk, empty_reply
from servers import free_port

from hicache_storage import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicache_storage import HiCacheStorage

    Answer = Callable[[list[bytes]], bytes]

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
