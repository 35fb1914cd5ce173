"""Stores that are damaged, absent, dead or slow below vLLM's own engine core."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from given_storage import STORAGES, given
from hicache_backends.memory import MemoryStorage
from hicache_conformance.tools.network.proxy import FaultProxy
from lateness import must_be_within, tried_again_if_late
from servers import RedisServer, free_port, wait_until
from vllm_engine import BLOCK, FULL, PROMPT, Engine

from hicache_storage.errors import BackendNotInstalled, ConfigError, UnknownBackend
from hicache_storage.integrations._jobs import JobSettings
from hicache_storage.testing import Fault, FaultyStorage, Odds

OTHER = [*PROMPT][:FULL] + [9] * 40
BY_DEFAULT = {"lookup_timeout_s": JobSettings().lookup_timeout_s}
SLACK_S = 1.0
"""Extra time for the steps of an engine on a busy machine."""


@pytest.fixture
def faulty(request: pytest.FixtureRequest) -> Generator[FaultyStorage]:
    with FaultyStorage(MemoryStorage()) as storage:
        STORAGES[request.node.name] = storage
        yield storage
        del STORAGES[request.node.name]


def plan(storage: FaultyStorage, *faults: tuple[str, Fault]) -> None:
    """Let all calls of some operations fail from now on."""
    storage._released.clear()  # of a try before
    storage._odds = [Odds(operation, fault, 1.0) for operation, fault in faults]


def page_files(config: dict[str, Any]) -> list[Path]:
    path = Path(config["config"]["path"])
    sizes = [(file.stat().st_size, file) for file in path.rglob("*") if file.is_file()]
    return sorted(file for size, file in sizes if size > 12288)


# --- damage
# -------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_a_miss_that_heals(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        engine.write(PROMPT)
    files = page_files(file_config)
    assert len(files) == 6
    data = bytearray(files[2].read_bytes())
    data[-100] ^= 4
    files[2].write_bytes(data)

    with Engine(file_config) as engine:
        answer = engine.write(PROMPT)
        assert (answer.wrong, answer.finished) == (0, True)
        assert answer.computed is not None
        assert answer.computed < FULL
        stats = engine.tier._connection.store.stats()
        assert (stats["load_corrupt"], stats["wrong_pages_deleted"]) == (1, 1)
    with Engine(file_config) as engine:
        healed = engine.write(PROMPT)
        assert (healed.computed, healed.wrong) == (FULL, 0)


def test_a_page_cut_short_is_a_miss_that_heals(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        engine.write(PROMPT)
    os.truncate(page_files(file_config)[0], 5000)

    with Engine(file_config) as engine:
        answer = engine.write(PROMPT)
        assert (answer.wrong, answer.finished) == (0, True)
    with Engine(file_config) as engine:
        assert engine.write(PROMPT).computed == FULL


def test_a_page_that_vanishes_after_the_lookup_is_asked_for_once(
    request: pytest.FixtureRequest, faulty: FaultyStorage
) -> None:
    """Otherwise vLLM would try to load the page again in each step."""
    plan(faulty, ("batch_exists", Fault.LIE))
    with Engine(given(request.node.name)) as engine:
        answer = engine.write(PROMPT)
        assert (answer.computed, answer.wrong, answer.finished) == (0, 0, True)
        assert faulty.calls["batch_get"] == 1


# --- absence
# ------------------------------------------------------------------------------------------


def test_a_store_that_cannot_be_reached_does_not_keep_the_engine_from_starting(
    tmp_path: Path,
) -> None:
    port = free_port()
    config = {"backend": "redis", "config": {"url": f"redis://127.0.0.1:{port}/0"}}
    with Engine(config) as engine:
        answer = engine.write(PROMPT)
        assert (answer.computed, answer.finished) == (0, True)
        with RedisServer(tmp_path / "redis", port=port):
            wait_until(lambda: engine.tier._connection.runner is not None)
            engine.forget_host()
            engine.write(PROMPT)
            with Engine(config) as cold:
                assert cold.write(PROMPT).computed == FULL


def test_a_start_that_hangs_does_not_keep_the_engine_from_starting(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = {"backend": "redis", "config": {"url": server.url}, "start_timeout_s": 0.2}
        server.pause()
        began_s = time.monotonic()
        with Engine(config) as engine:
            assert time.monotonic() - began_s < 5
            assert engine.write(PROMPT).finished
            server.resume()
            wait_until(lambda: engine.tier._connection.runner is not None)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"backend": "redsi"}, UnknownBackend, "did you mean 'redis'"),
        ({"backend": "redis"}, ConfigError, "url"),
        ({"backend": "file", "config": {"pth": "/x"}}, ConfigError, "did you mean 'path'"),
        ({"backend": "file", "config": "@/no/such.yaml"}, ConfigError, "config: /no/such.yaml"),
        ({"backend": "file", "config": "{}"}, ConfigError, "'@' and the path of a file"),
        ({}, ConfigError, "backend: this field is required"),
        (
            {"backend": "file", "lookup_timout_s": 1},
            ConfigError,
            "did you mean 'lookup_timeout_s'",
        ),
        ({"backend": "file", "spec_name": "CPUOffloadingSpec"}, ConfigError, "spec_name"),
        (
            {"backend": "dynamic", "config": {"backend_name": "a", "module_path": "no_such"}},
            (ConfigError, BackendNotInstalled),
            "class_name",
        ),
    ],
)
def test_a_wrong_config_ends_the_start_and_is_named(
    fields: dict[str, Any], error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(fields)


# --- death and slowness
# -------------------------------------------------------------------------------


def test_a_store_that_dies_is_a_miss(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = {"backend": "redis", "config": {"url": server.url}}
        with Engine(config) as engine:
            engine.write(PROMPT)
            server.stop()
            engine.forget_host()
            answer = engine.write(PROMPT)
            assert (answer.computed, answer.wrong, answer.finished) == (0, 0, True)
            server.start()
            wait_until(lambda: engine.tier._connection.store.breaker.state != "open")
            engine.step_until(lambda: not engine.core.scheduler.has_requests())
            engine.forget_host()
            engine.write(OTHER)
            engine.forget_host()
            assert engine.write(OTHER).computed == len(OTHER) // BLOCK * BLOCK


def test_a_store_that_dies_and_returns_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(tmp_path / "redis") as server:
        config = {"backend": "redis", "config": {"url": server.url}}
        with Engine(config) as engine:
            engine.write(PROMPT)
            server.stop()
            engine.write(OTHER)
            wait_until(lambda: "RedisStorage: the store is unavailable" in caplog.text)
            server.start()
            wait_until(lambda: engine.tier._connection.store.breaker.state != "open")
            engine.forget_host()
            engine.write(OTHER)
            wait_until(lambda: "RedisStorage: the store is back to normal" in caplog.text)


@pytest.mark.parametrize("class_name", ["GivenStorage", "BoundedStorage"])
@tried_again_if_late
def test_a_lookup_that_hangs_is_a_miss_after_its_deadline(
    request: pytest.FixtureRequest, faulty: FaultyStorage, class_name: str
) -> None:
    with Engine({**given(request.node.name, class_name), **BY_DEFAULT}) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        plan(faulty, ("batch_exists", Fault.HANG))
        answer = engine.ask(PROMPT)
        faulty.release()
        assert (answer.computed, answer.finished) == (0, True)
        must_be_within(answer.held_s, 1.5, least_s=0.4)


@tried_again_if_late
def test_a_load_that_hangs_is_given_up_and_never_touches_vllms_rows(
    request: pytest.FixtureRequest, faulty: FaultyStorage
) -> None:
    with Engine(given(request.node.name)) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        plan(faulty, ("batch_get", Fault.HANG))
        answer = engine.ask(PROMPT)
        assert (answer.computed, answer.wrong, answer.finished) == (0, 0, True)
        assert engine.settle()
        rows = bytes(engine.tier._rows.memory)
        faulty.release()
        wait_until(lambda: engine.tier._connection.runner.stats()["private_nbytes_used"] == 0)
        assert bytes(engine.tier._rows.memory) == rows
        must_be_within(answer.held_s, 3, least_s=1.5)


@pytest.mark.parametrize(("operation", "limit_s"), [("batch_exists", 1.5), ("batch_get", 3.0)])
@tried_again_if_late
def test_a_revocable_store_that_hangs_holds_no_request(
    file_config: dict[str, Any],
    operation: str,
    limit_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    with Engine({**file_config, **BY_DEFAULT}) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        storage = engine.tier._connection.store.storage
        assert storage.capabilities.revocable
        call = getattr(storage, operation)

        def hang(*arguments: Any) -> Any:
            released.wait(30)
            return call(*arguments)

        monkeypatch.setattr(storage, operation, hang)
        answer = engine.ask(PROMPT)
        released.set()
        assert (answer.computed, answer.wrong, answer.finished) == (0, 0, True)
        must_be_within(answer.held_s, limit_s)


@tried_again_if_late
def test_a_silent_server_is_a_miss_of_a_lookup_in_time(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        url = "redis://{}:{}/0".format(*proxy.address)
        with Engine({"backend": "redis", "config": {"url": url}, **BY_DEFAULT}) as engine:
            engine.write(PROMPT)
            engine.forget_host()
            proxy.go_silent()
            answer = engine.ask(PROMPT)
            proxy.pass_through()
            assert (answer.computed, answer.finished) == (0, True)
            must_be_within(answer.held_s, 1.5)


@pytest.mark.parametrize("timeout_s", [None, 1.0, 10.0])
@tried_again_if_late
def test_a_server_that_falls_silent_holds_no_request(
    tmp_path: Path, timeout_s: float | None
) -> None:
    """`redis` is bounded, so by default it loads directly into vLLM's memory."""
    fields = {} if timeout_s is None else {"timeout_s": timeout_s}
    with (
        RedisServer(tmp_path / "redis") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        host, port = proxy.address
        config = {"backend": "redis", "config": {"url": f"redis://{host}:{port}/0", **fields}}
        with Engine(config) as engine:
            engine.write(PROMPT)
            engine.forget_host()
            asked = engine.start(PROMPT)
            engine.step_until(lambda: engine.tier._jobs or asked.is_finished())
            proxy.go_silent()
            began_s = time.monotonic()
            engine.step_until(asked.is_finished)
            elapsed_s = time.monotonic() - began_s
            proxy.pass_through()
            assert engine.workers.seen[asked.request_id][2] == 0
            must_be_within(elapsed_s, 3)


@tried_again_if_late
def test_a_server_that_drips_holds_no_request(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path / "redis") as server,
        FaultProxy(("127.0.0.1", server.port)) as proxy,
    ):
        host, port = proxy.address
        config = {"backend": "redis", "config": {"url": f"redis://{host}:{port}/0"}, **BY_DEFAULT}
        with Engine(config) as engine:
            engine.write(PROMPT)
            engine.forget_host()
            proxy.drip(2000)
            answer = engine.ask(PROMPT)
            proxy.pass_through()
            assert (answer.wrong, answer.finished) == (0, True)
            must_be_within(answer.held_s, 0.5 + 3 + SLACK_S)


def test_stores_that_hang_hold_no_request_and_are_over_at_their_deadline(
    request: pytest.FixtureRequest, faulty: FaultyStorage
) -> None:
    with Engine({**given(request.node.name), "store_timeout_s": 1}) as engine:
        plan(faulty, ("batch_set", Fault.HANG))
        assert engine.ask(PROMPT).finished
        assert engine.settle(3 + SLACK_S)
        assert engine.tier._connection.runner.stats()["store_pages_timeout"] == 6
        faulty.release()


def test_stores_that_find_no_room_are_dropped_and_counted(
    request: pytest.FixtureRequest, faulty: FaultyStorage
) -> None:
    small = {**given(request.node.name), "queued_nbytes": 2 * 12288, "store_timeout_s": 1}
    with Engine(small) as engine:
        plan(faulty, ("batch_set", Fault.HANG))
        for turn in range(4):
            engine.ask([turn, *PROMPT][:FULL])
        assert engine.settle()
        assert engine.tier._connection.runner.stats()["store_pages_refused"] > 0
        faulty.release()


# --- the end
# ------------------------------------------------------------------------------------------


def region_of(engine: Engine) -> Path:
    return Path(
        f"/dev/shm/vllm_offload_{engine.core.vllm_config.kv_transfer_config.engine_id}.mmap"
    )


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(path.name)


def test_a_shutdown_unmaps_vllms_memory(config: dict[str, Any]) -> None:
    engine = Engine(config)
    region = region_of(engine)
    engine.write(PROMPT)
    assert mappings(region) > 0
    engine.close()

    assert not region.exists()
    assert mappings(region) == 0


@pytest.mark.parametrize("operation", ["batch_exists", "batch_get", "batch_set"])
def test_a_shutdown_during_a_call_that_hangs_ends_and_leaves_no_thread_at_work(
    request: pytest.FixtureRequest, faulty: FaultyStorage, operation: str
) -> None:
    engine = Engine({**given(request.node.name), "close_timeout_s": 1, "store_timeout_s": 1})
    engine.write(PROMPT)
    engine.forget_host()
    plan(faulty, (operation, Fault.HANG))
    engine.start(OTHER if operation == "batch_set" else PROMPT)
    engine.step_until(lambda: (operation, Fault.HANG) in faulty.struck)
    began_s = time.monotonic()
    engine.close()
    assert time.monotonic() - began_s < 1 + 3 + SLACK_S
    assert mappings(region_of(engine)) == 0
    faulty.release()
    wait_until(
        lambda: (
            not [
                thread.name
                for thread in threading.enumerate()
                if thread.name.startswith("hicache") and thread.is_alive()
            ]
        )
    )


def test_a_shutdown_waits_for_stores_that_are_under_way(
    request: pytest.FixtureRequest, faulty: FaultyStorage
) -> None:
    plan(faulty, ("batch_set", Fault.DELAY))
    engine = Engine(given(request.node.name))
    engine.ask(PROMPT)
    engine.step_until(lambda: faulty.calls["batch_set"] > 0)
    engine.close()
    plan(faulty)

    with Engine(given(request.node.name)) as cold:
        assert cold.write(PROMPT).computed == FULL


def test_an_error_of_the_adapter_itself_is_a_miss(
    file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    with Engine(file_config) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        tier = engine.tier
        for owner, name in (
            (tier._lookups, "ask"),
            (tier._lookups, "forget"),
            (tier._groups, "of_keys"),
            (tier._groups, "batches"),
            (tier, "_answer_all"),
            (tier, "_finish_load"),
            (tier, "_finish_store"),
            (tier._metrics, "take"),
            (tier._connection.runner, "submit_load"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, broken)
                answer = engine.ask(PROMPT, limit_s=2)
                engine.settle(2)
                engine.forget_host()
                assert (answer.wrong, answer.finished) == (0, True), name
        assert tier._metrics.errors > 0
