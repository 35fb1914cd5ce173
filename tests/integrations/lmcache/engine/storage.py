"""The backends below LMCache's own storage manager and its controllers, byte for byte.

LMCache has an environment of its own, so `make test-lmcache` runs these tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lmcache_engine import ADAPTER, Engine, GroupPlan, Plan
from servers import wait_until

WINDOWED = Plan(
    groups=(
        GroupPlan(),
        GroupPlan(shapes=((2, 2, 16, 32), (1, 2, 16, 8)), dtypes=("float32", "bfloat16"), window=2),
    )
)


def test_a_cold_server_reads_the_objects_of_another(params: dict[str, Any]) -> None:
    with Engine(params) as writer:
        held = writer.write(range(6))
    with Engine(params) as reader:
        read = reader.read(range(8))
        assert (6, 6) == (read.chunks, read.l2_hits)
        assert held == read.held


def test_a_server_reads_back_what_its_l1_has_lost(params: dict[str, Any]) -> None:
    with Engine(params) as engine:
        held = engine.write(range(6))
        engine.wipe()
        assert held == engine.read(range(6)).held


def test_objects_of_several_groups_and_layouts_are_stored_by_one_task(
    params: dict[str, Any],
) -> None:
    with Engine(params, WINDOWED) as engine:
        held = engine.write(range(6))
        assert 1 == engine.status["jobs"]["store_jobs"]
    with Engine(params, WINDOWED) as engine:
        full, windowed = engine.read(range(6)).held
        assert held[0] == full
        assert held[1][-2:] == windowed[-2:]


def test_a_gap_ends_the_prefix(params: dict[str, Any]) -> None:
    with Engine(params) as engine:
        held = engine.write([0, 1, 2, 4, 5])
        engine.wipe()
        assert held[0][:3] == engine.read(range(6)).held[0]


def test_more_objects_than_one_piece_of_a_job(file_params: dict[str, Any]) -> None:
    plan = Plan(groups=(GroupPlan(shapes=((2, 2, 64, 1024),)),))  # 512 KiB
    with Engine(file_params, plan, l1_gb=0.2) as engine:
        held = engine.write(range(100))
        engine.wipe()
        assert held == engine.read(range(100)).held


def test_a_config_in_a_file(file_params: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "hicache.yaml"
    path.write_text(f"path: {file_params['config']['path']}\n")
    with Engine({**file_params, "config": f"@{path}"}) as engine:
        held = engine.write(range(2))
        engine.wipe()
        assert held == engine.read(range(2)).held


def test_lmcaches_eviction_and_deletion_reach_the_store(params: dict[str, Any]) -> None:
    with Engine(params) as engine:
        engine.write(range(4))
        ((first, *_),) = engine.plan.keys(range(4))
        used = engine.adapter.get_usage().total_bytes_used
        engine.adapter.delete([first])
        assert used * 3 // 4 == engine.adapter.get_usage().total_bytes_used
        engine.wipe()
        assert 0 == engine.read(range(4)).chunks
        assert 3 == engine.read(range(1, 4)).chunks


def test_the_status_has_the_breaker_and_the_counters(file_params: dict[str, Any]) -> None:
    with Engine(file_params) as engine:
        engine.write(range(4))
        engine.wipe()
        engine.read(range(4))
        status = engine.status
        assert status["is_healthy"]
        assert {"reads": "closed", "writes": "closed"} == status["breaker"]
        assert (4, 4) == (status["pages"]["save_ok"], status["pages"]["load_ok"])
        assert {"lookup": 0, "load": 0, "store": 0} == status["tasks"]


def test_objects_are_written_at_their_second_use_also_after_a_restart(
    params: dict[str, Any],
) -> None:
    params = {**params, "admission": {"second_use": True, "remembered_pages": 1000}}
    with Engine(params) as engine:
        held = engine.write(range(4))
        assert 0 == engine.adapter.get_usage().total_bytes_used
        assert 4 == engine.status["jobs"]["not_admitted_first_use"]
        engine.wipe()
        assert 0 == engine.read(range(4)).chunks
    with Engine(params) as engine:
        sketches = engine.session.runner._admission._sketches
        wait_until(lambda: bool(sketches._restored))
        engine.write(range(2))
        engine.wipe()
        assert held[0][:2] == engine.read(range(4)).held[0]


def test_lmcaches_benchmark_of_adapters_verifies_every_object(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The objects of the benchmark are rows of bytes of different ranks, looked up without layouts."""
    spec = {**ADAPTER, "adapter_params": {**params, "kv_dtype": "uint8"}}
    options = ["--no-skip-verify", "--lookup-max-hit-rate", "1", "--num-keys", "4"]
    command = ["lmcache", "bench", "l2", "--l2-adapter", json.dumps(spec), *options]
    monkeypatch.setattr(sys, "argv", command)
    with contextlib.suppress(SystemExit):
        importlib.import_module("lmcache.cli.main").main()
    assert "data verified OK" in capsys.readouterr().out


@pytest.mark.parametrize("serde", ["fp8"])
def test_serialized_objects_of_one_size(serde: str, file_params: dict[str, Any]) -> None:
    fields = {"type": serde}
    params = {**file_params, "serde": fields}
    with Engine(params, serde=fields) as engine:
        assert 0 == engine.read(range(2)).chunks  # as before every request: its hint has the layout
        engine.write(range(2))
        engine.wipe()
        read = engine.read(range(2))
        assert 2 == read.chunks
    with Engine(params, serde=fields) as engine:
        assert read.held == engine.read(range(2)).held
    with Engine(file_params, serde=fields) as unnamed:
        assert 0 == unnamed.read(range(2)).chunks
        unnamed.write(range(3, 5), wait=False)
        wait_until(lambda: 'a "serde"' in "".join(unnamed.status["refusals"]))
