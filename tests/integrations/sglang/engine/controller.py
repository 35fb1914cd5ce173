"""The backends below SGLang's own cache controller and its threads, byte for byte.

SGLang has an environment of its own, so `make test-sglang` runs these tests.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
from hicache_backends.file import FileStorage
from servers import RedisServer, wait_until
from sglang_engine import (
    PAGE_TOKENS,
    Engine,
    PoolName,
    PoolPlan,
    PoolTransfer,
    engine_world,
    get_context,
    tensors_of,
)

from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

BEFORE_0_5_23 = metadata.version("sglang") < "0.5.23"
TOKENS = list(range(1000, 1000 + 8 * PAGE_TOKENS))
MORE = [*TOKENS, *[7] * PAGE_TOKENS]
DRAFT = PoolPlan(name=PoolName.DRAFT, layers=1, heads=1)
WINDOW = PoolPlan(name=PoolName.SWA, layers=2, slots_of_its_own=True)
LAYOUTS = [
    *(
        ("mha", layout)
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    ),
    *(("mla", layout) for layout in ("layer_first", "page_first", "page_first_direct")),
]


@pytest.fixture(scope="session", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


def write_and_read(writer: Engine, reader: Engine) -> None:
    """Back up pages by one engine, and prefetch them by another one, byte for byte."""
    writer.fill(1)
    written = writer.write(TOKENS)
    assert written.pages == 8

    reader.wipe()
    read = reader.read(MORE)
    assert (read.hits, read.pages) == (8, 8)
    assert {
        name: pages[-len(read.held[name]) :] for name, pages in written.held.items()
    } == read.held


@pytest.mark.parametrize("v1", [0, 1])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_cold_engine_reads_what_another_wrote(
    kind: str, layout: str, v1: int, file_config: dict[str, Any]
) -> None:
    plan = PoolPlan(kind=kind, layout=layout)
    with (
        Engine([plan], {**file_config, "interface_v1": v1}) as writer,
        Engine([plan], {**file_config, "interface_v1": v1}) as reader,
    ):
        write_and_read(writer, reader)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_keys_and_values_of_two_widths(layout: str, file_config: dict[str, Any]) -> None:
    plan = PoolPlan(kind="asymmetric", layout=layout)
    with Engine([plan], file_config) as writer, Engine([plan], file_config) as reader:
        write_and_read(writer, reader)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_moved_in_place_and_by_copy_are_the_same(
    kind: str, layout: str, file_config: dict[str, Any]
) -> None:
    plan = PoolPlan(kind=kind, layout=layout)
    with (
        Engine([plan], file_config) as writer,
        Engine([plan], {**file_config, "interface_v1": 0}) as reader,
    ):
        write_and_read(writer, reader)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_target_draft_and_window_together(kind: str, config: dict[str, Any]) -> None:
    plans = [PoolPlan(kind=kind), WINDOW]
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine(plans, config, late=[DRAFT]) as writer,
        Engine(plans, config, late=[DRAFT]) as reader,
    ):
        write_and_read(writer, reader)


def test_a_prefix_without_its_draft_is_no_hit(file_config: dict[str, Any]) -> None:
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine([PoolPlan()], file_config) as plain,
        Engine([PoolPlan()], file_config, late=[DRAFT]) as speculative,
    ):
        plain.write(TOKENS)
        assert speculative.read(TOKENS).hits == 0
        speculative.write(TOKENS)
        assert speculative.read(TOKENS).pages == 8


def test_a_window_shortens_the_prefix_to_where_it_is_whole(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], file_config) as engine:
        engine.write(TOKENS[: 4 * PAGE_TOKENS])
        written = engine.write(TOKENS)
        side = {"keys": ["__placeholder__"] * 2, "hit_policy": "trailing_pages", "name": "swa"}
        transfer = type("Transfer", (), side)
        result = engine.storage.batch_exists_v2(written.hashes, [transfer])
        assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [4, 8])
        shorter = engine.storage.batch_exists_v2(written.hashes[:7], [transfer])
        assert (shorter.kv_hit_pages, shorter.restorable_prefix_pages) == (4, [4])


def test_a_node_of_more_pages_than_a_batch(file_config: dict[str, Any]) -> None:
    long = list(range(300 * PAGE_TOKENS))
    with (
        engine_world(speculative_draft_model_path="org/draft"),
        Engine([PoolPlan()], file_config, late=[DRAFT], pages=310) as writer,
        Engine([PoolPlan()], file_config, late=[DRAFT], pages=310) as reader,
    ):
        writer.fill(1)
        written = writer.write(long)
        read = reader.read(long)
        assert (written.pages, read.pages) == (300, 300)
        assert read.held == written.held


@pytest.mark.skipif(
    BEFORE_0_5_23, reason="0.5.22 selects the writing ranks before it opens the storage"
)
def test_every_rank_has_draft_heads_of_its_own_beside_shared_latents(
    file_config: dict[str, Any],
) -> None:
    draft = PoolPlan(name=PoolName.DRAFT, layers=1, heads=2)
    held: list[Any] = []
    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=2, speculative_draft_model_path="org/draft"),
            Engine([PoolPlan(kind="mla")], file_config, late=[draft]) as engine,
        ):
            engine.fill(1)  # all ranks get the same latents and different draft heads
            engine.host(PoolName.DRAFT).kv_buffer.fill_(rank + 1)
            held.append(engine.write(TOKENS).held)
    assert held[0][PoolName.DRAFT] != held[1][PoolName.DRAFT]

    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=2, speculative_draft_model_path="org/draft"),
            Engine([PoolPlan(kind="mla")], file_config, late=[draft]) as engine,
        ):
            read = engine.read(TOKENS)
            assert read.pages == 8
            assert read.held == held[rank]


def test_ranks_of_two_sizes_share_pages_by_head_groups(file_config: dict[str, Any]) -> None:
    config = {**file_config, "tp_lcm_size": 4}
    with engine_world(tp_size=2), Engine([PoolPlan(layout="page_head", heads=4)], config) as two:
        two.fill(1)
        written = two.write(TOKENS)
        assert written.pages == 8
    halves: list[list[bytes]] = []
    for rank in (0, 1):
        with (
            engine_world(tp_rank=rank, tp_size=4),
            Engine([PoolPlan(layout="page_head", heads=2)], config) as four,
        ):
            read = four.read(TOKENS)
            assert read.pages == 8
            halves.append(read.held[PoolName.KV])
    for page, *parts in zip(written.held[PoolName.KV], *halves, strict=True):
        quarter = len(page) // 4  # K of both halves, then V of both
        assert page == b"".join(
            part[plane * quarter : (plane + 1) * quarter] for plane in (0, 1) for part in parts
        )


@pytest.mark.parametrize("v1", [0, 1])
def test_an_anchor_without_bytes(v1: int, file_config: dict[str, Any]) -> None:
    config = {**file_config, "interface_v1": v1}
    side = PoolPlan(name=PoolName.DEEPSEEK_V4_C4, kind="mla")
    plans = [PoolPlan(kind="logical"), side]
    with Engine(plans, config) as writer, Engine(plans, config) as reader:
        writer.fill(1)
        written = writer.write(TOKENS)
        read = reader.read(MORE)
        assert (written.pages, read.hits, read.pages) == (8, 8, 8)
        assert read.held[side.name] == written.held[side.name]


@pytest.mark.parametrize(
    "other",
    [
        {"plan": PoolPlan(layout="page_first_direct")},
        {"plan": PoolPlan(dtype="float16")},
        {"plan": PoolPlan(start_layer=3)},
        {"plan": PoolPlan(layers=2)},
        {"plan": PoolPlan(kind="mla")},
        {"model": "org-model"},
        {"place": {"tp_size": 2, "tp_rank": 1}},
        {"place": {"pp_size": 2, "pp_rank": 1}},
        {"place": {"weight_version": "7"}},
        {"place": {"json_model_override_args": '{"rope_theta": 5}'}},
        {"adapter": {"tenant": "other"}},
    ],
    ids="-".join,
)
def test_engines_that_differ_share_no_pages(
    other: dict[str, Any], file_config: dict[str, Any]
) -> None:
    with Engine([PoolPlan()], file_config) as writer:
        writer.write(TOKENS)
    config = {**file_config, "adapter": other.get("adapter", {})}
    plan = other.get("plan", PoolPlan())
    with (
        engine_world(**other.get("place", {})),
        Engine([plan], config, model=other.get("model", "org/model")) as reader,
    ):
        assert reader.read(TOKENS).hits == 0


def test_heads_of_ranks_that_outnumber_them_are_not_confused(file_config: dict[str, Any]) -> None:
    plan = PoolPlan(heads=1)
    with engine_world(tp_rank=2, tp_size=4), Engine([plan], file_config) as writer:
        writer.write(TOKENS)
    with engine_world(tp_rank=2, tp_size=8), Engine([plan], file_config) as reader:
        assert reader.read(TOKENS).hits == 0


def test_detach_and_attach_under_a_running_controller(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan(), WINDOW], file_config) as engine:
        engine.fill(1)
        written = engine.write(TOKENS)
        storage = engine.storage
        engine.controller.detach_storage_backend()
        assert storage.batch_exists(written.hashes) == 0
        assert storage.get_stats() is None
        engine.controller.attach_storage_backend(
            "dynamic", PAGE_TOKENS, "org/model", dict(file_config), list(engine.entries.values())
        )
        engine.wipe()
        assert engine.read(TOKENS).held[PoolName.KV] == written.held[PoolName.KV]


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


def test_answers_are_strict(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        written = engine.write(TOKENS)
        storage, indices = engine.storage, written.places[PoolName.KV]
        hashes = [*written.hashes[:3], "ab" * 32, *written.hashes[4:]]
        assert storage.batch_get_v1(hashes, indices) == [True] * 3 + [False] + [True] * 4
        assert storage.batch_get_v1([], indices[:0]) == []
        assert storage.batch_get_v1(hashes, indices[:-1]) == [False] * 8
        assert storage.batch_set_v1(["../etc"] * 8, indices) == [False] * 8
        many = written.hashes + [f"{n:064x}" for n in range(5000)]
        assert storage.batch_exists(many) == 8
        assert storage.batch_exists([]) == 0
        assert [storage.exists(many[0]), storage.exists(many[-1])] == [True, False]
        assert storage.get("ab" * 32, engine.host().get_dummy_flat_data_page()) is None
        unknown = type("Transfer", (), {"name": "indexer", "keys": hashes, "host_indices": indices})
        assert storage.batch_set_v2([unknown]) == {"indexer": [False] * 8}


def test_clear_removes_its_own_pages_only(file_config: dict[str, Any]) -> None:
    with (
        Engine([PoolPlan()], file_config) as one,
        Engine([PoolPlan()], file_config, model="other") as other,
    ):
        one.write(TOKENS)
        other.write(TOKENS)
        assert one.storage.clear() is True
        assert (one.read(TOKENS).hits, other.read(TOKENS).hits) == (0, 8)


def test_metrics_are_sglangs_own(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config, metrics=True) as engine:
        engine.write(TOKENS)
        engine.read(TOKENS)
        metrics = engine.storage.get_stats()
        assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([8], [8])
        assert all(rate > 0 for rate in metrics.backup_bandwidth + metrics.prefetch_bandwidth)
        assert engine.storage.get_stats().prefetch_pgs == []


def test_packed_fp8_has_the_type_of_the_server_arguments(file_config: dict[str, Any]) -> None:
    plan = PoolPlan(dtype="float8_e4m3fn")
    with pytest.raises(Exception, match="kv-cache-dtype"):
        Engine([plan], file_config)
    with engine_world(kv_cache_dtype="fp8_e4m3"), Engine([plan], file_config) as writer:
        writer.write(TOKENS)
    with engine_world(kv_cache_dtype="fp8_e5m2"), Engine([plan], file_config) as reader:
        assert reader.read(TOKENS).hits == 0
    stated = {**file_config, "adapter": {"dtype": "float8_e4m3fn"}}
    with Engine([plan], stated) as reader:
        assert reader.read(TOKENS).hits == 8


def test_a_draft_of_no_known_model_is_refused(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        entry = engine.entry(DRAFT)
        with pytest.raises(Exception, match="draft_model"):
            engine.controller.register_host_pool_entry(entry)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"backend_name": "rediss"}, "did you mean"),
        ({"paht": "/tmp"}, "paht"),
        ({"adapter": {"tenent": "x"}}, "did you mean 'tenant'"),
        ({"config": 1}, "must be an object"),
    ],
)
def test_a_wrong_config_fails_the_attach_by_name(
    fields: dict[str, Any], message: str, file_config: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match=message):
        Engine([PoolPlan()], {**file_config, **fields})


def test_signal_handlers_are_not_changed(file_config: dict[str, Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Engine([PoolPlan()], file_config):
        pass
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(
    "change",
    [{"weight_version": "step-2"}, {"model_path": "org/model"}],
    ids=lambda c: next(iter(c)),
)
def test_pages_of_former_weights_are_not_hits_when_weights_change_under_a_server(
    change: dict[str, str], file_config: dict[str, Any]
) -> None:
    plans = [PoolPlan()]
    with engine_world(), Engine(plans, file_config) as engine:
        engine.write(TOKENS)
        assert engine.read(TOKENS).hits == 8

        get_context().override("model_runner.update_model_fields", **change)

        assert engine.read(MORE).hits == 0
        engine.wipe()
        assert engine.write(TOKENS).pages == 0


def test_a_change_that_kv_does_not_depend_on_keeps_the_hits(
    file_config: dict[str, Any],
) -> None:
    with engine_world(), Engine([PoolPlan()], file_config) as engine:
        engine.write(TOKENS)
        get_context().override("scheduler", max_running_requests=3)
        get_context().override(  # an attach by HTTP does so after opening the storage
            "scheduler.attach_hicache",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config="{}",
            hicache_storage_prefetch_policy="timeout",
            hicache_write_policy="write_through",
        )

        assert engine.read(TOKENS).hits == 8


def test_servers_with_other_scale_files_do_not_share(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    with (
        engine_world(quantization_param_path=str(tmp_path / "one")),
        Engine([PoolPlan()], file_config) as engine,
    ):
        engine.write(TOKENS)
        assert engine.read(TOKENS).hits == 8
    with (
        engine_world(quantization_param_path=str(tmp_path / "two")),
        Engine([PoolPlan()], file_config) as engine,
    ):
        assert engine.read(TOKENS).hits == 0


def test_a_store_that_hangs_holds_no_call_and_no_memory_of_sglangs(
    file_config: dict[str, Any],
) -> None:
    """The late call writes into a bounce buffer that nothing reads."""
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


@pytest.mark.parametrize("bounded", [False, True])
def test_only_a_bounded_store_gets_sglangs_memory(
    bounded: bool,  # noqa: FBT001 - a parameter of the test
    file_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        FileStorage, "capabilities", replace(FileStorage.capabilities, bounded=bounded)
    )
    with Engine([PoolPlan()], file_config) as engine:
        store = engine.storage._storage
        batch_set, addresses = store.batch_set, list[int]()

        def watched(space: Any, hashes: Any, pages: Any) -> list[bool]:
            addresses.extend(address for page in pages for address, _ in page.addresses[1:])
            stored: list[bool] = batch_set(space, hashes, pages)
            return stored

        store.batch_set = watched
        engine.write(TOKENS)
        direct = [
            tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes
            for address in addresses
            for tensor in tensors_of(engine.host())
        ]
        assert any(direct) is bounded
        assert engine.read(TOKENS).pages == 8


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
