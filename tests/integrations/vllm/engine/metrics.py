"""The metrics of the tier on a port of their own, beside those in vLLM's registry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scrapes import exposition, sample
from servers import RedisServer, free_port
from vllm_engine import PROMPT, Engine

from hicache_storage.integrations.vllm._tier import _replica
from hicache_storage.metrics import ViewCollector, serve

LABELS = {"engine": "vllm", "rank": "0"}


def test_a_port_shows_the_tier(file_config: dict[str, Any]) -> None:
    port = free_port()
    with Engine({**file_config, "metrics_port": port}) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        engine.write(PROMPT)
        text = exposition(port)

    file = {**LABELS, "backend": "file"}
    for direction in ("load", "save"):
        assert 6 == sample(text, "hicache_pages_total", **file, direction=direction, verdict="ok")
    assert 6 == sample(text, "hicache_match_pages_total", **file, answer="present")
    assert 1 == sample(text, "hicache_store_attached", **file)
    assert 0 == sample(text, "hicache_engine_events_total", **file, event="adapter_errors")


def test_a_store_that_does_not_answer_is_not_attached(tmp_path: Path) -> None:
    port = free_port()
    with RedisServer(tmp_path) as server:
        url = server.url
    fields = {"backend": "redis", "config": {"url": url}, "start_timeout_s": 0.5}
    with Engine({**fields, "metrics_port": port}):
        text = exposition(port)

    assert 0 == sample(text, "hicache_store_attached", **LABELS, backend="redis")


def test_a_port_in_use_does_not_stop_the_engine(
    file_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        serve(ViewCollector(), port=0) as taken,
        Engine({**file_config, "metrics_port": taken.port}) as engine,
    ):
        engine.write(PROMPT)
        assert engine.tier._metrics.errors == 0

    assert "choose another port" in caplog.text


def test_a_replica_has_the_port_after_that_of_the_one_before() -> None:
    parallel = SimpleNamespace(data_parallel_index=2)

    assert 2 == _replica(SimpleNamespace(config=SimpleNamespace(parallel=parallel)))
