"""Replies that no Redis server should send. They lead to answers, or to errors of this package."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.redis import RedisStorage
from pages import blank, hash_of, page, space
from redis_servers import RespServer, bulk, empty_reply, slots
from servers import wait_until

from hicache_storage import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Callable

SPACE = space()
HASHES = [hash_of(number) for number in range(3)]
LAST_SLOT = 16383

ODD = [
    b"+OK\r\n",
    b":1\r\n",
    b":-7\r\n",
    b":99999999999999999999\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$3\r\n\xff\xfe\x00\r\n",
    b"*0\r\n",
    b"*-1\r\n",
    b"*1\r\n$-1\r\n",
    b"*2\r\n$1\r\n0\r\n:1\r\n",
    b"*2\r\n$1\r\n0\r\n*1\r\n:7\r\n",
    b"*2\r\n:0\r\n*0\r\n",
    b"*1\r\n" * 50 + b"*0\r\n",
    b"-\r\n",
    b"-ERR\r\n",
    b"-ERR \xff\xfe\r\n",
    b"-\xff\xfe \xff\r\n",
    b"-MOVED\r\n",
    b"-ASK 1\r\n",
    b"-ERR invalid password\r\n",
    b"-NOPERM no\r\n",
    b"garbage\r\n",
    b"\x15\x03\x03\x00\x02\x02\x16",
    b"$5\r\n" + b"[" * 5 + b"\r\n",
    b"*1\r\n" + bulk(b"[" * 100_000),
    b"*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\n?\r\n:1\r\n",
]


class TestOddReplies:
    @pytest.mark.parametrize("is_cluster", [False, True])
    @pytest.mark.parametrize("seed", range(12))
    def test_none_is_a_foreign_error(self, seed: int, *, is_cluster: bool) -> None:
        """Every malformed reply leads to an answer, or to an error of this package."""
        choice = random.Random(seed)
        well = threading.Event()
        well.set()

        def answer(command: list[bytes]) -> bytes:
            if not well.is_set() and choice.random() < 0.7:
                return choice.choice(ODD)
            if command[0] == b"CLUSTER":
                return slots((0, LAST_SLOT, server.port))
            return empty_reply(command, is_cluster=is_cluster)

        with RespServer(answer) as server:
            config = {"url": server.url, "timeout_s": 0.2, "password": "hunter2"}
            with RedisStorage.from_config(config) as storage:
                calls: list[Callable[[], Any]] = [
                    lambda: storage.open_space(space(model=str(choice.random()))),
                    lambda: storage.batch_exists(SPACE, HASHES),
                    lambda: storage.batch_get(SPACE, HASHES, [blank() for _ in range(3)]),
                    lambda: storage.batch_set(SPACE, HASHES, [page()] * 3),
                    lambda: storage.batch_delete(SPACE, HASHES),
                    lambda: list(storage.spaces()),
                    lambda: next(storage.scan(SPACE), None),
                    lambda: RedisStorage.from_config(config).close(),
                ]
                for _ in range(6):
                    for call in calls:
                        well.clear()
                        with suppress(HiCacheError):
                            call()
                well.set()
                wait_until(lambda: _is_well(storage))

    def test_a_password_repeated_by_a_server_is_not_shown(self) -> None:
        def answer(command: list[bytes]) -> bytes:
            if command[0] == b"AUTH":
                args = b" ".join(b"`%b`" % part for part in command[1:])
                return b"-ERR unknown command `AUTH`, with args beginning with: %b\r\n" % args
            return empty_reply(command)

        with RespServer(answer) as server, pytest.raises(HiCacheError) as raised:
            RedisStorage.from_config({"url": server.url, "password": "hunter2"})

        error: BaseException | None = raised.value
        while error is not None:
            assert "hunter2" not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        assert "unknown command" in str(raised.value)


def _is_well(storage: RedisStorage) -> bool:
    try:
        return storage.batch_exists(SPACE, HASHES) == [False] * 3
    except HiCacheError:
        return False
