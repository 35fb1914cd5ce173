"""One memory region has one owner, and KV of a LoRA adapter is used only with the same weights."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import vllm_engine
from vllm_engine import CONNECTOR, FULL, MODULE, PROMPT, Engine, config, kv_transfer

from hicache_storage.errors import ConfigError

multi: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
).MultiConnector
ENGINE_ID = f"engine-{os.getpid()}"


def ours(path: Path) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 20,
            "backend": "file",
            "config": {"path": str(path)},
        },
    }


def of_vllm(path: Path) -> dict[str, Any]:
    tiers = [{"type": "fs", "root_dir": str(path)}]
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**extra, "secondary_tiers": tiers},
    }


def export_metrics(children: list[dict[str, Any]]) -> None:
    """Build the metrics of all connectors, as an API server does."""
    registry = prometheus_client.CollectorRegistry()
    kinds = {
        kind: partial(kind, registry=registry)
        for kind in (
            prometheus_client.Counter,
            prometheus_client.Gauge,
            prometheus_client.Histogram,
        )
    }
    transfer = kv_transfer.KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    frontend = config.VllmConfig(
        device_config=config.DeviceConfig(device="cpu"), kv_transfer_config=transfer
    )
    multi.build_prom_metrics(frontend, kinds, ["engine"], {0: ["0"]})


@pytest.mark.parametrize(
    "others", [[ours], [of_vllm], []], ids=["ours twice", "and vLLM's", "ours"]
)
@pytest.mark.parametrize("order", [1, -1], ids=["ours first", "ours last"])
def test_two_offloading_connectors_of_one_engine_are_refused(
    others: list[Callable[[Path], dict[str, Any]]], order: int, tmp_path: Path
) -> None:
    children = [ours(tmp_path / "ours"), *(make(tmp_path / "other") for make in others)]
    children = children[::order]

    def start() -> None:
        with Engine({"connectors": children}, connector="MultiConnector", module=None):
            pass

    if not others:
        start()
        export_metrics(children)
        return
    for run in (start, partial(export_metrics, children)):
        with pytest.raises(ConfigError, match="two offloading connectors share"):
            run()
    assert not list(tmp_path.rglob("*.page"))


def named(vllm_config: Any) -> None:
    vllm_config.kv_transfer_config.engine_id = ENGINE_ID


def test_a_second_engine_with_the_same_id_is_refused(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    other = {"backend": "file", "config": {"path": str(tmp_path / "other")}}

    with Engine(file_config, edit=named) as engine:
        with pytest.raises(
            ConfigError, match=rf"share /dev/shm/vllm_offload_{ENGINE_ID}.*engine_id"
        ):
            Engine(other, edit=named)
        assert engine.write(PROMPT).wrong == 0
    with Engine(file_config, edit=named) as engine:
        assert FULL == engine.ask(PROMPT).computed


def test_two_tiers_of_one_connector_share_its_region(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    other = {"type": "HiCacheTier", "backend": "file", "config": {"path": str(tmp_path / "other")}}

    with Engine({**file_config, "secondary_tiers": [other]}, edit=named) as engine:
        assert engine.write(PROMPT).finished


KILLED = f"""
import sys
sys.path.insert(0, {str(Path(vllm_engine.__file__).parent)!r})
from vllm_engine import Engine

def named(vllm_config):
    vllm_config.kv_transfer_config.engine_id = {ENGINE_ID!r}

engine = Engine({{"backend": "file", "config": {{"path": sys.argv[1]}}}}, edit=named)
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_region_of_a_killed_engine_does_not_stop_the_next_one(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, tmp_path / "other"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert b"ready\n" in process.stdout
        with pytest.raises(ConfigError, match="share"):
            Engine(file_config, edit=named)
        process.send_signal(signal.SIGKILL)
        process.wait()
    region = Path(f"/dev/shm/vllm_offload_{ENGINE_ID}.mmap")
    assert region.exists()
    try:
        with Engine(file_config, edit=named) as engine:
            assert engine.write(PROMPT).finished
    finally:
        region.unlink(missing_ok=True)


# --- LoRA adapters
# ------------------------------------------------------------------------------------


def with_lora(vllm_config: Any) -> None:
    lora = importlib.import_module("vllm.config.lora")
    vllm_config.lora_config = lora.LoRAConfig(max_lora_rank=8, max_loras=1)


def write_adapter(path: Path, weights: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_text(weights)
    time.sleep(0.2)  # the engine starts later
    return path


def start(extra: dict[str, Any]) -> Engine:
    return Engine(extra, edit=with_lora, hash_algo="sha256_cbor")


def ask(engine: Engine, adapter: Path) -> tuple[int, int]:
    """Return the tokens that were found, and the wrong blocks. The KV depends on the adapter's bytes."""
    request: Any = importlib.import_module("vllm.lora.request").LoRARequest
    engine.workers.weights = (adapter / "adapter_model.safetensors").read_text()
    engine.count += 1
    asked = vllm_engine.requests.Request(
        f"r{engine.count}",
        list(PROMPT),
        vllm_engine.sampling.SamplingParams(max_tokens=1),
        None,
        lora_request=request("lora", 1, str(adapter)),
        block_hasher=engine.core.request_block_hasher,
    )
    engine.core.add_request(asked)
    engine.step_until(asked.is_finished)
    assert engine.settle()
    _, found, wrong = engine.workers.seen[asked.request_id]
    return found, wrong


def test_equal_weights_under_a_path_are_hits_and_others_are_misses(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", "step 1")
    with start(file_config) as engine:
        assert (0, 0) == ask(engine, adapter)
        assert engine.write(PROMPT).computed == 0  # without the adapter
    with start(file_config) as engine:
        assert (FULL, 0) == ask(engine, adapter)
    write_adapter(adapter, "step 2")
    with start(file_config) as engine:
        assert (0, 0) == ask(engine, adapter)
        assert not engine.tier._adapters  # the request has ended
    with start(file_config) as engine:
        assert (FULL, 0) == ask(engine, adapter)


def test_an_adapter_that_changes_while_the_engine_runs_is_not_stored(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    """vLLM's own caches may still have KV of the former weights."""
    adapter = write_adapter(tmp_path / "adapter", "step 1")
    with start({**file_config, "revision": "1"}) as engine:
        ask(engine, adapter)
        write_adapter(adapter, "step 2")
        ask(engine, adapter)
    for weights, found in (("step 2", 0), ("step 1", FULL)):
        write_adapter(adapter, weights)
        with start({**file_config, "revision": "1"}) as engine:
            assert (found, 0) == ask(engine, adapter)


def test_an_adapter_that_is_newer_than_the_engine_needs_a_revision(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    found: list[tuple[int, int]] = []
    for extra in (file_config, {**file_config, "revision": "1"}):
        adapter = tmp_path / f"adapter-{len(found)}"
        with start(extra) as engine:
            write_adapter(adapter, "step 1")
            ask(engine, adapter)
        with start(extra) as engine:
            found.append(ask(engine, adapter))

    assert [(0, 0), (FULL, 0)] == found


def test_a_reset_renews_the_key_spaces_of_adapters(
    file_config: dict[str, Any], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", "step 1")
    with start(file_config) as engine:
        ask(engine, adapter)
        engine.tier.drain_jobs()
        engine.forget_host()
        assert (0, 0) == ask(engine, adapter)
