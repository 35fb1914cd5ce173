"""Stores that fail, lie, hang, answer too slowly or die below LMCache's own storage manager."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance.tools.network.proxy import FaultProxy
from lateness import must_be_within, tried_again_if_late
from lmcache_engine import Engine, GroupPlan, Plan
from servers import RedisServer, wait_until

from hicache_storage.integrations._jobs import JobSettings
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, WrapperStorage

QUICK: dict[str, Any] = {"lookup_timeout_s": 0.3, "load_timeout_s": 0.6, "store_timeout_s": 0.6}
# LMCache answers a request within our deadlines, plus the steps of its threads on a busy machine.
HELD_LIMIT_S = 10.0
BY_DEFAULT = {"lookup_timeout_s": JobSettings().lookup_timeout_s}
HELD_BY_DEFAULT = [("batch_exists", 1.5), ("batch_get", 3.0)]
"""Operations that hang, and how long a request may wait for each with default settings."""
TWO_GROUPS = Plan(groups=(GroupPlan(), GroupPlan(shapes=((1, 2, 16, 32),), window=2)))


class Faulty(FaultyStorage):
    """A storage whose next calls fail as a test specifies. A call that hangs ends after 1.5 s."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner, hang_s=1.5)

    def fail(self, operation: str, later: int, fault: Fault) -> None:
        """Let a call of `operation` fail: the one that comes after `later` other calls."""
        self._strikes[operation, self.calls[operation] + later] = fault

    def forgive(self) -> None:
        self._strikes.clear()


def close_breakers(engine: Engine) -> None:
    engine.session.store.breaker.record(succeeded=True)


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("backend", ["file", "redis"])
def test_every_fault_at_every_call_of_a_whole_scenario(
    backend: str,
    fault: Fault,
    file_params: dict[str, Any],
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    """A server answers within the deadlines, never holds a wrong byte, and the pages heal.

    A faulty `file` is not revocable, and moves pages through private memory. `redis` is bounded, and
    reads into LMCache's memory directly.
    """
    config = {"url": redis_server.url, "prefix": f"{tmp_path.name}:"}
    redis_params = {"backend": "redis", "config": config, "revision": "main"}
    params = {**(file_params if backend == "file" else redis_params), **QUICK}
    with Engine(params, TWO_GROUPS, wrap=Faulty) as engine:
        wait_until(lambda: engine.session is not None)  # the limits hold for the opening, too
        store: Faulty = engine.session.store.storage
        rounds = itertools.product(("batch_exists", "batch_get", "batch_set"), (0, 1))
        for number, (operation, later) in enumerate(rounds):
            chunks = range(100 * number, 100 * number + 4)
            close_breakers(engine)
            store.fail(operation, later, fault)
            held = engine.write(chunks, seed=number)
            engine.wipe()
            for _ in range(2):
                read = engine.read(chunks)
                assert read.elapsed_s < HELD_LIMIT_S
                assert read.held[0] == held[0][: len(read.held[0])]
                assert set(read.held[1]) <= set(held[1])
                engine.wipe()
            store.forgive()
            close_breakers(engine)
            engine.write(chunks, seed=number)
            engine.wipe()
            wait_until(partial(_heals, engine, chunks, held))
        assert sum(store.struck.values()) >= 6
        assert {"lookup": 0, "load": 0, "store": 0} == engine.status["tasks"]


def _heals(engine: Engine, chunks: range, held: list[list[bytes]]) -> bool:
    """Return whether a read gets the whole prefix. If not, write the prefix again."""
    read = engine.read(chunks)
    engine.wipe()
    if read.held[0] == held[0]:
        return True
    engine.session.store.breaker.record(succeeded=True)
    engine.write(chunks, seed=chunks[0] // 100)
    engine.wipe()
    return False


def test_a_flipped_bit_shortens_the_prefix_and_heals(
    tmp_path: Path, file_params: dict[str, Any]
) -> None:
    with Engine(file_params) as engine:
        held = engine.write(range(6))
        engine.wipe()
        name = engine.plan.keys([2])[0][0].chunk_hash.hex()
        (path,) = (path for path in tmp_path.rglob(f"*{name}*") if path.is_file())
        data = bytearray(path.read_bytes())
        data[-100] ^= 4
        path.write_bytes(data)

        assert held[0][:2] == engine.read(range(6)).held[0]
        assert not path.exists()
        engine.wipe()
        engine.write(range(6))
        engine.wipe()
        assert held == engine.read(range(6)).held


@pytest.mark.parametrize(("operation", "limit_s"), HELD_BY_DEFAULT)
@tried_again_if_late
def test_a_store_that_hangs_holds_no_request_by_default_settings(
    operation: str, limit_s: float, file_params: dict[str, Any]
) -> None:
    """Pages of such a store move through private memory, because its calls may go on for long."""

    def wrap(inner: HiCacheStorage) -> HiCacheStorage:
        return FaultyStorage(inner, hang_s=30)

    with Engine({**file_params, **BY_DEFAULT}, wrap=wrap) as engine:
        engine.write(range(3))
        engine.wipe()
        store: FaultyStorage = engine.session.store.storage
        store._strikes[operation, store.calls[operation]] = Fault.HANG
        read = engine.read(range(3))
        store.release()
        assert 0 == read.chunks
        must_be_within(read.elapsed_s, limit_s)


@pytest.mark.parametrize(("operation", "limit_s"), HELD_BY_DEFAULT)
@tried_again_if_late
def test_a_revocable_store_that_hangs_holds_no_request_by_default_settings(
    operation: str,
    limit_s: float,
    file_params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    with Engine({**file_params, **BY_DEFAULT}) as engine:
        engine.write(range(3))
        engine.wipe()
        assert engine.session.store.storage.capabilities.revocable
        before_calls(monkeypatch, engine, operation, lambda: released.wait(30))
        read = engine.read(range(3))
        released.set()
        assert 0 == read.chunks
        must_be_within(read.elapsed_s, limit_s)


@pytest.mark.parametrize(("operation", "limit_s"), HELD_BY_DEFAULT)
@tried_again_if_late
def test_a_silent_server_holds_no_request_by_default_settings(
    operation: str,
    limit_s: float,
    proxied: tuple[FaultProxy, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy, params = proxied
    with Engine({**params, **BY_DEFAULT}) as engine:
        engine.write(range(3))
        engine.wipe()
        before_calls(monkeypatch, engine, operation, proxy.go_silent)
        read = engine.read(range(3))
        proxy.pass_through()
        assert 0 == read.chunks
        must_be_within(read.elapsed_s, limit_s)


def before_calls(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, operation: str, act: Callable[[], object]
) -> None:
    """Call `act` before each call of an operation of the engine's storage."""
    storage = engine.session.store.storage
    call = getattr(storage, operation)

    def changed(*arguments: Any) -> Any:
        act()
        return call(*arguments)

    monkeypatch.setattr(storage, operation, changed)


class Watched(WrapperStorage):
    """A store that notes the memory of its reads."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.addresses: list[int] = []

    def batch_get(self, space: Any, hashes: Any, pages: Any) -> list[bool]:
        self.addresses += [address for page in pages for address, _ in page.addresses]
        return super().batch_get(space, hashes, pages)


@pytest.mark.parametrize("revocable", [True, False])
def test_only_revocable_stores_get_lmcaches_memory(
    revocable: bool,  # noqa: FBT001 - a parameter of the test
    file_params: dict[str, Any],
) -> None:
    def wrap(inner: HiCacheStorage) -> HiCacheStorage:
        watched = Watched(inner)
        vars(watched)["capabilities"] = replace(inner.capabilities, revocable=revocable)
        return watched

    with Engine(file_params, wrap=wrap) as engine:
        engine.write(range(3))
        engine.wipe()
        assert 3 == engine.read(range(3)).chunks
        arena = _arena(engine)
        addresses = engine.session.store.storage.addresses
        assert revocable is any(address in arena for address in addresses)


def _arena(engine: Engine) -> range:
    (manager,) = engine.manager._l1_managers_by_id.values()
    memory = manager.get_l1_memory_desc()
    return range(memory.ptr, memory.ptr + memory.size)


@pytest.fixture
def proxied(
    redis_server: RedisServer, tmp_path: Path
) -> Generator[tuple[FaultProxy, dict[str, Any]]]:
    """Yield a proxy before Redis, and the params of an adapter behind it."""
    with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        config = {"url": "redis://{}:{}".format(*proxy.address), "prefix": f"{tmp_path.name}:"}
        yield proxy, {"backend": "redis", "config": config, "revision": "main"}


@pytest.mark.parametrize(
    "break_network",
    [("go_silent", ()), ("refuse", ()), ("drip", (2000,)), ("truncate_after", (9000,))],
    ids=["hangs", "dies", "drips", "truncates"],
)
def test_a_server_of_redis_that_fails_is_a_miss_in_time(
    break_network: tuple[str, tuple[int, ...]], proxied: tuple[FaultProxy, dict[str, Any]]
) -> None:
    proxy, params = proxied
    with Engine({**params, **BY_DEFAULT}) as engine:
        held = engine.write(range(6))
        engine.wipe()
        name, arguments = break_network
        getattr(proxy, name)(*arguments)
        read = engine.read(range(6))
        assert read.elapsed_s < 0.5 + 1 + 2 + 3 + 1  # a lookup, its grace, a load, and its grace
        assert read.held[0] == held[0][: read.chunks]
        proxy.pass_through()
        engine.wipe()
        wait_until(lambda: _again(engine, held))


def _again(engine: Engine, held: list[list[bytes]]) -> bool:
    engine.session.store.breaker.record(succeeded=True)
    read = engine.read(range(6))
    engine.wipe()
    return read.held == held


def test_a_server_that_dies_and_returns_is_in_the_log(
    proxied: tuple[FaultProxy, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    proxy, params = proxied
    with Engine(params) as engine:
        held = engine.write(range(6))
        engine.wipe()
        proxy.refuse()
        engine.read(range(6))
        assert "reads from RedisStorage: the store is unavailable" in caplog.text
        proxy.pass_through()
        engine.wipe()
        wait_until(lambda: _again(engine, held))
    assert "reads from RedisStorage: the store is back to normal" in caplog.text


def test_stores_that_hang_pin_nothing_for_longer_than_their_deadline(
    proxied: tuple[FaultProxy, dict[str, Any]],
) -> None:
    proxy, params = proxied
    with Engine({**params, **QUICK}) as engine:
        engine.write(range(2))
        proxy.go_silent()
        began_s = time.monotonic()
        engine.write(range(10, 16))
        assert time.monotonic() - began_s < HELD_LIMIT_S
        engine.wipe()  # it waits until no object is locked
        proxy.pass_through()


def test_a_store_that_cannot_be_reached_at_the_start_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_storage.integrations.lmcache._attachment._REOPEN_S", 0.1)
    with RedisServer(tmp_path) as server:
        server.stop()
        params = {"backend": "redis", "config": {"url": server.url}, "revision": ""}
        with Engine(params) as engine:
            assert not engine.status["is_healthy"]
            assert "127.0.0.1" in engine.status["failure"]
            engine.write(range(3), wait=False)
            assert 0 == engine.read(range(10, 13)).chunks
            server.start()
            wait_until(lambda: bool(engine.status["attached"]))
            engine.wipe()
            held = engine.write(range(3))
            engine.wipe()
            assert held == engine.read(range(3)).held


@pytest.mark.parametrize("operation", ["batch_get", "batch_set"])
def test_a_shutdown_under_io_waits_until_no_object_is_in_use(
    operation: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    """LMCache frees its arena right after `close` has returned."""
    under_way, ended = threading.Event(), threading.Event()

    class Slow(WrapperStorage):
        def batch_get(self, space: Any, hashes: Any, pages: Any) -> list[bool]:
            return self.slowly(
                "batch_get", lambda: super(Slow, self).batch_get(space, hashes, pages)
            )

        def batch_set(self, space: Any, hashes: Any, pages: Any) -> list[bool]:
            return self.slowly(
                "batch_set", lambda: super(Slow, self).batch_set(space, hashes, pages)
            )

        def slowly(self, name: str, call: Callable[[], list[bool]]) -> list[bool]:
            if name == operation:
                under_way.set()
                time.sleep(1)
            done = call()
            if name == operation:
                ended.set()
            return done

    config = {"url": redis_server.url, "prefix": f"{tmp_path.name}:"}
    engine = Engine({"backend": "redis", "config": config, "revision": ""}, wrap=Slow)
    try:
        engine.write(range(3), wait=operation == "batch_get")
        if operation == "batch_get":
            engine.wipe()
            engine.begin_read(engine.plan.keys(range(3)))
        assert under_way.wait(30)
    finally:
        engine.adapter.close()
        assert ended.is_set()
        engine.close()


def test_lmcaches_locks_outlive_our_deadlines(file_params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="l1_read_ttl_s"):
        Engine({**file_params, "store_timeout_s": 200})
    with Engine({**file_params, "store_timeout_s": 200, "l1_read_ttl_s": 1000}):
        pass
