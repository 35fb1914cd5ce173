"""Stores that fail or hang below SGLang's own cache controller."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hicache_backends.file import FileStorage
from servers import RedisServer, wait_until
from sglang_engine import (
    PAGE_TOKENS,
    TOKENS,
    WINDOW,
    Engine,
    PoolName,
    PoolPlan,
    PoolTransfer,
    engine_world,
)

from hicache_storage.errors import StorageUnavailable

BEFORE_0_5_23 = metadata.version("sglang") < "0.5.23"


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


@pytest.mark.skipif(BEFORE_0_5_23, reason="0.5.22 has none")
def test_sglangs_failure_injector(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    with Engine([PoolPlan(), WINDOW], file_config) as engine:
        assert "FailureInjector" in type(engine.storage).__name__
        engine.fill(1)
        complete = 0
        for turn in range(30):
            tokens = [turn, *TOKENS[1:]]
            written = engine.write(tokens)
            engine.host().free(written.places[PoolName.KV])
            engine.host(WINDOW.name).free(written.places[WINDOW.name])
            read = engine.read(tokens)
            arrived = read.held.get(PoolName.KV, [])[: read.pages]
            assert arrived == written.held[PoolName.KV][: read.pages]
            complete += read.pages == 8
            if read.held:
                engine.host().free(read.operation.host_indices)
                engine.host(WINDOW.name).free(read.operation.pool_transfers[0].host_indices)
        assert 0 < complete < 30


def test_a_store_that_dies_is_a_miss(tmp_path: Path, file_config: dict[str, Any]) -> None:
    with RedisServer(tmp_path / "redis") as server:
        fields = {"url": server.url, "timeout_s": 2}
        config = {**file_config, "backend_name": "redis", "config": fields}
        del config["path"]
        with Engine([PoolPlan()], config) as engine:
            written = engine.write(TOKENS)
            server.stop()
            assert engine.read(TOKENS).hits == 0
            assert engine.write([5, *TOKENS[1:]]).pages == 0
            assert engine.storage.batch_exists(written.hashes) == 0


def test_a_store_that_dies_and_returns_is_in_the_log(
    tmp_path: Path, file_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = {**file_config, "backend_name": "redis", "url": server.url, "timeout_s": 2}
        del config["path"]
        with Engine([PoolPlan()], config) as engine:
            server.stop()
            engine.write(TOKENS)
            assert "writes to RedisStorage: the store is unavailable" in caplog.text
            server.start()
            wait_until(lambda: engine.write(TOKENS).pages == 8)
    assert "writes to RedisStorage: the store is back to normal" in caplog.text


def test_a_store_that_hangs_gives_the_pages_back_untouched(
    tmp_path: Path, file_config: dict[str, Any]
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = {**file_config, "backend_name": "redis", "url": server.url, "timeout_s": 1}
        del config["path"]
        with Engine([PoolPlan()], config) as engine:
            engine.fill(1)
            written = engine.write(TOKENS)
            server.pause()
            indices = engine.host().alloc(8 * PAGE_TOKENS)
            before = engine.bytes_at(PoolName.KV, indices)
            assert engine.storage.batch_get_v1(written.hashes, indices) == [False] * 8
            server.resume()
            assert engine.bytes_at(PoolName.KV, indices) == before
            engine.host().free(indices)
            wait_until(lambda: engine.storage.batch_exists(written.hashes) == 8)
            assert engine.read(TOKENS).held == written.held


def test_signal_handlers_are_not_changed(file_config: dict[str, Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Engine([PoolPlan()], file_config):
        pass
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_store_that_hangs_holds_no_call_and_no_memory_of_sglangs(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that ends late writes into a bounce buffer that nothing reads."""
    unclaimed = replace(FileStorage.capabilities, revocable=False)
    monkeypatch.setattr(FileStorage, "capabilities", unclaimed)
    with Engine([PoolPlan()], {**file_config, "adapter": {"timeout_s": 0.5}}) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        store = engine.storage._storage
        batch_get, go_on, ended = store.batch_get, threading.Event(), threading.Event()

        def late(*arguments: Any) -> list[bool]:
            go_on.wait(60)
            found: list[bool] = batch_get(*arguments)
            ended.set()
            return found

        store.batch_get = late
        indices = engine.host().alloc(8 * PAGE_TOKENS)
        engine.wipe()
        before = engine.bytes_at(PoolName.KV, indices)

        began_s = time.monotonic()
        assert engine.storage.batch_get_v1(written.hashes, indices) == [False] * 8
        assert time.monotonic() - began_s < 30
        go_on.set()
        assert ended.wait(30)
        assert engine.bytes_at(PoolName.KV, indices) == before

        store.batch_get = batch_get
        wait_until(lambda: all(engine.storage.batch_get_v1(written.hashes, indices)))
        assert engine.bytes_at(PoolName.KV, indices) == written.held[PoolName.KV]


def test_the_switch_interval_is_that_of_the_settings(file_config: dict[str, Any]) -> None:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        with Engine([PoolPlan()], {**file_config, "adapter": {"switch_interval_s": 0.001}}):
            assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        sys.setswitchinterval(before_s)


def test_writes_that_hang_hold_up_no_reads(file_config: dict[str, Any]) -> None:
    adapter = {"timeout_s": 0.3, "parallelism": 8}
    with Engine([PoolPlan()], {**file_config, "adapter": adapter}) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        store, indices = engine.storage._storage, written.places[PoolName.KV]
        batch_set, go_on = store.batch_set, threading.Event()

        def late(*arguments: Any) -> list[bool]:
            go_on.wait(60)
            stored: list[bool] = batch_set(*arguments)
            return stored

        store.batch_set = late
        for turn in range(6):
            hashes = [f"{turn * 100 + n:064x}" for n in range(8)]
            engine.storage._store.breaker.writes.record(
                succeeded=True
            )  # otherwise the breaker may open
            assert engine.storage.batch_set_v1(hashes, indices) == [False] * 8
        try:
            wait_until(lambda: all(engine.storage.batch_get_v1(written.hashes, indices)))
        finally:
            go_on.set()


def test_a_call_ends_with_the_first_batch_that_gets_no_answer(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], file_config, pages=512) as engine:
        hashes = [f"{n:064x}" for n in range(400)]
        indices = engine.host().alloc(400 * PAGE_TOKENS)
        calls: list[int] = []

        def gone(_: Any, hashes: Sequence[str], *__: Any) -> list[bool]:
            calls.append(len(hashes))
            raise StorageUnavailable("gone")

        engine.storage._storage.batch_set = gone
        assert engine.storage.batch_set_v1(hashes, indices) == [False] * 400
        assert sum(calls) <= 128
        calls.clear()
        transfers = [
            PoolTransfer(name=PoolName.KV, keys=hashes, host_indices=indices),
            PoolTransfer(
                name=PoolName.SWA, keys=hashes[:2], host_indices=indices[: 2 * PAGE_TOKENS]
            ),
        ]
        assert engine.storage.batch_set_v2(transfers) == {
            PoolName.KV: [False] * 400,
            PoolName.SWA: [False] * 2,
        }
        assert sum(calls) <= 128


def test_a_forked_child_gets_misses_at_once_and_closes_nothing(
    file_config: dict[str, Any],
) -> None:
    with Engine([PoolPlan()], {**file_config, "adapter": {"timeout_s": 60}}) as engine:
        written = engine.write(TOKENS)
        child = os.fork()
        if not child:
            try:
                began_s = time.monotonic()
                found = engine.storage.batch_exists(written.hashes)
                engine.storage.close()
                os._exit(found or time.monotonic() - began_s > 30)
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.storage.batch_exists(written.hashes) == 8
