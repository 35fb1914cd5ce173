"""The functions between SGLang's call and the system call that moves a page are few."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from path_frames import c_frames, path_frames
from servers import RedisServer
from sglang_engine import TOKENS, Engine, PoolPlan, engine_world, hashes_of

from hicache_storage import native

pytestmark = pytest.mark.skipif(
    native.implementation != "compiled", reason="the path leads into the compiled data plane"
)

READ = [
    "read_files",
    "files_read",
    "file_read",
    "read_page",
    "read_cached",
    "syscall",
]
SEND = ["exchange_lines", "lines_exchange", "socket_send", "sendmsg"]


@pytest.fixture(autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


def test_a_get_from_a_file_takes_few_functions(file_config: dict[str, Any]) -> None:
    with (
        path_frames("Adapter.batch_get_v1", READ[0]) as path,
        Engine([PoolPlan()], file_config) as engine,
    ):
        keys, indices = hashes_of(TOKENS), torch.arange(len(TOKENS))
        assert all(engine.storage.batch_set_v1(keys, indices))
        assert all(engine.storage.batch_get_v1(keys, indices))

    assert 0 < len(path.caller) <= 6, path.caller
    assert len(path.caller) + len(path.thread) + c_frames(READ) <= 16, path.thread


def test_a_set_to_redis_takes_few_functions(
    redis_server: RedisServer, file_config: dict[str, Any]
) -> None:
    config = {**file_config, "backend_name": "redis", "url": redis_server.url}
    del config["path"]
    with (
        path_frames("Adapter.batch_set_v1", SEND[0]) as path,
        Engine([PoolPlan()], config) as engine,
    ):
        keys, indices = hashes_of(TOKENS), torch.arange(len(TOKENS))
        assert all(engine.storage.batch_set_v1(keys, indices))

    assert 0 < len(path.caller) <= 6, path.caller
    assert len(path.caller) + len(path.thread) + c_frames(SEND) <= 24, path.thread
