"""The metrics of the adapter: on a port of their own, and on SGLang's `/metrics`."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import values
from scrapes import exposition, sample
from servers import free_port
from sglang_engine import TOKENS, Engine, PoolPlan, engine_world

from hicache_storage.integrations.sglang._adapter import rank_number

common: Any = importlib.import_module("sglang.srt.utils.common")
Starlette: Any = importlib.import_module("starlette.applications").Starlette
TestClient: Any = importlib.import_module("starlette.testclient").TestClient

LABELS = {"engine": "sglang", "backend": "file", "rank": "0"}


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


def test_a_port_shows_the_adapter(file_config: dict[str, Any]) -> None:
    port = free_port()
    with Engine([PoolPlan()], {**file_config, "adapter": {"metrics_port": port}}) as engine:
        engine.write(TOKENS)
        engine.read(TOKENS)
        text = exposition(port)

    loaded = {**LABELS, "direction": "load", "verdict": "ok"}
    assert 8 == sample(text, "hicache_pages_total", **loaded)
    assert 1 == sample(text, "hicache_store_attached", **LABELS)
    assert sample(text, "hicache_load_seconds_count", **LABELS, verdict="ok")


def test_weights_that_change_are_a_store_that_is_not_attached(file_config: dict[str, Any]) -> None:
    port = free_port()
    with Engine([PoolPlan()], {**file_config, "adapter": {"metrics_port": port}}) as engine:
        engine.storage._outdated = True

        assert 0 == sample(exposition(port), "hicache_store_attached", **LABELS)


def test_sglangs_own_endpoint_shows_the_adapter(
    file_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's HTTP server runs in a process of its own, so it reads the metric files of the ranks."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())  # type: ignore[no-untyped-call]  # no types
    with Engine([PoolPlan()], file_config, metrics=True) as engine:
        engine.write(TOKENS)
        engine.read(TOKENS)
        engine.storage.close()
    app = Starlette()
    common.add_prometheus_middleware(app)
    text = TestClient(app).get("/metrics").text

    for direction in ("load", "save"):
        moved = {**LABELS, "direction": direction, "verdict": "ok"}
        assert 8 == sample(text, "hicache_pages_total", **moved)
        assert sample(text, f"hicache_{direction}_seconds_count", **LABELS, verdict="ok")


def test_without_enable_metrics_there_is_no_thread_for_them(file_config: dict[str, Any]) -> None:
    with Engine([PoolPlan()], file_config):
        assert "hicache-metrics" not in {thread.name for thread in threading.enumerate()}


def test_every_rank_of_an_engine_has_a_number_of_its_own() -> None:
    numbers = [
        rank_number(_ranks(dp=dp, pp=pp, cp=cp, tp=tp), 0)
        for dp in range(2)
        for pp in range(2)
        for cp in range(2)
        for tp in range(4)
    ]

    assert list(range(32)) == numbers


def test_replicas_without_dp_attention_have_numbers_of_their_own() -> None:
    assert 16 + 3 == rank_number(_ranks(dp=0, pp=0, cp=0, tp=3), 1)


def _ranks(*, dp: int, pp: int, cp: int, tp: int) -> Any:
    storage: Any = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    return storage.HiCacheStorageConfig(
        tp_rank=tp,
        tp_size=4,
        pp_rank=pp,
        pp_size=2,
        attn_cp_rank=cp,
        attn_cp_size=2,
        dp_rank=dp,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="org/model",
    )
