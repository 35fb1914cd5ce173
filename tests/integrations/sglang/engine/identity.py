"""Servers whose pages have different bytes share none, under SGLang's own cache controller."""

from __future__ import annotations

import importlib
import re
from collections.abc import Generator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang_engine import DRAFT, MORE, TOKENS, Engine, PoolPlan, engine_world, get_context

BEFORE_0_5_23 = metadata.version("sglang") < "0.5.23"
AT_THE_LAUNCH: dict[str, Any] = {"hicache_storage_backend": "dynamic"}


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


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


def test_packed_fp8_has_the_type_of_the_server_arguments(file_config: dict[str, Any]) -> None:
    plan = PoolPlan(dtype="float8_e4m3fn")
    if not BEFORE_0_5_23:  # 0.5.22 shows the pool on the device, and with it the type
        with pytest.raises(Exception, match="kv-cache-dtype"):
            Engine([plan], file_config)
    with engine_world(kv_cache_dtype="fp8_e4m3"), Engine([plan], file_config) as writer:
        writer.write(TOKENS)
    other = PoolPlan(dtype="float8_e5m2")
    with engine_world(kv_cache_dtype="fp8_e5m2"), Engine([other], file_config) as reader:
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
        engine_world(quantization_param_path=str(tmp_path / "one"), **AT_THE_LAUNCH),
        Engine([PoolPlan()], file_config) as engine,
    ):
        engine.write(TOKENS)
        assert engine.read(TOKENS).hits == 8
    with (
        engine_world(quantization_param_path=str(tmp_path / "two"), **AT_THE_LAUNCH),
        Engine([PoolPlan()], file_config) as engine,
    ):
        assert engine.read(TOKENS).hits == 0


def test_a_running_server_refuses_files_that_are_newer_than_it(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "scales").write_text("newer than this process")
    with (
        engine_world(quantization_param_path=str(tmp_path / "scales")),
        pytest.raises(Exception, match=r"scales changed at .* restart the server"),
    ):
        Engine([PoolPlan()], file_config)


def test_the_platform_and_the_release_are_in_the_key(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        (space,) = engine.storage._pools["kv"].spaces
    shared = {**file_config, "adapter": {"share_between_releases": True, "platform": "cuda-sm90"}}
    with Engine([PoolPlan()], shared) as engine:
        (common,) = engine.storage._pools["kv"].spaces

    release = metadata.version("sglang")
    assert re.fullmatch(rf"page_first\+platform=cpu-\w+\+sglang={re.escape(release)}", space.layout)
    assert common.layout == "page_first+platform=cuda-sm90"


@pytest.mark.skipif(BEFORE_0_5_23, reason="0.5.22 shows the order on the pool of the device")
def test_the_order_of_heads_in_device_memory_is_in_the_key(file_config: dict[str, Any]) -> None:
    layouts: list[str] = []
    kind: Any = importlib.import_module("sglang.srt.mem_cache.device_pool_info").KVBufferLayout
    with Engine([PoolPlan()], file_config) as engine:
        host = engine.host()
        for order in ("nhd", "hnd"):
            (info,) = host._buffer_infos
            host._buffer_infos = (
                msgspec.structs.replace(
                    info, buffers=msgspec.structs.replace(info.buffers, layout=kind(order))
                ),
            )
            engine.storage._pools._pools.clear()
            engine.storage.register_mem_pool_host(host)
            layouts += [space.layout for space in engine.storage._pools["kv"].spaces]

    assert [("device=hnd" in layout) for layout in layouts] == [False, True]


def test_an_adapter_that_is_loaded_again_has_another_id() -> None:
    """A page hash has the id of the adapter, so pages of the former weights are not found."""
    registry: Any = importlib.import_module("sglang.srt.lora.lora_registry")
    loaded = [registry.LoRARef(lora_name="a", lora_path="/a").lora_id for _ in range(2)]
    managers = Path(registry.__file__).parents[1] / "managers"
    source = (managers / "tokenizer_control_mixin.py").read_text()  # an import needs a whole server

    assert loaded[0] != loaded[1]
    made = re.findall(r"new_adapter = LoRARef\((.*?)\)", source, re.DOTALL)
    assert len(made) == 2  # from a path, from tensors
    assert not [fields for fields in made if "lora_id" in fields]


@pytest.mark.parametrize(
    ("name", "value"),
    [("SGLANG_FP8_IGNORED_LAYERS", "k_proj"), ("SGLANG_INT4_WEIGHT", "1")],
    ids=lambda text: text,
)
def test_servers_with_another_environment_do_not_share(
    name: str, value: str, file_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine([PoolPlan()], file_config) as engine:
        engine.write(TOKENS)
        assert engine.read(TOKENS).hits == 8
    monkeypatch.setenv(name, value)
    with Engine([PoolPlan()], file_config) as engine:
        assert engine.read(TOKENS).hits == 0
