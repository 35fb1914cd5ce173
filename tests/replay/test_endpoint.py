"""The metrics of a replay, scraped while it runs."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from scrapes import exposition, sample
from servers import free_port

from hicache_storage.config import StorageChoice
from hicache_storage.errors import ConfigError, install_command
from hicache_storage.metrics import ViewCollector, serve
from hicache_storage.replay.disruptions import Disruptions
from hicache_storage.replay.driver import ReplaySettings
from hicache_storage.replay.job import ReplayJob, run_job
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.trace import synthetic_trace
from hicache_storage.topology import Topology

MEMORY = StorageChoice(backend="memory", config={})
LABELS = {"engine": "replay", "backend": "memory", "rank": "0"}


def job(port: int, disruptions: Disruptions | None = None) -> ReplayJob:
    settings = ReplaySettings(
        model="m", pools=(PoolShape("kv", KVShape("mha", 1, 2, 2)),), host_nbytes=1 << 20
    )
    requests = synthetic_trace(0, conversations=10, limit=12)
    return ReplayJob(MEMORY, settings, disruptions or Disruptions(), requests, port)


def run(replayed: ReplayJob, at_the_end: Callable[[], None]) -> None:
    """Run a replay, and call `at_the_end` after its last request, while it is still open."""

    def progress(done: int) -> None:
        if done == len(replayed.requests):
            at_the_end()

    run_job(replayed, stop=threading.Event(), progress=progress)


def test_the_port_shows_store_and_controller() -> None:
    port = free_port()
    texts: list[str] = []
    run(job(port), lambda: texts.append(exposition(port)))

    (text,) = texts
    assert 1 == sample(text, "hicache_store_attached", **LABELS)
    assert 12 == sample(text, "hicache_controller_events_total", **LABELS, event="requests")
    assert sample(text, "hicache_match_seconds_count", **LABELS, verdict="ok")


def test_a_rank_adds_its_number_to_the_port() -> None:
    port = free_port()
    first = job(port - 1)
    second = replace(first, settings=replace(first.settings, topology=Topology(tp_size=2), rank=1))
    texts: list[str] = []
    run(second, lambda: texts.append(exposition(port)))

    assert 1 == sample(texts[0], "hicache_store_attached", **{**LABELS, "rank": "1"})


def test_the_store_after_a_swap_has_a_label_of_its_own() -> None:
    port = free_port()
    texts: list[str] = []
    swapped = Disruptions(swap=MEMORY, swap_after=1)
    run(job(port, swapped), lambda: texts.append(exposition(port)))

    shown = [
        sample(texts[0], "hicache_store_attached", **{**LABELS, "backend": backend})
        for backend in ("memory", "memory-2")
    ]
    assert [0.0, 1.0] == sorted(each for each in shown if each is not None)


def test_a_port_in_use_is_refused() -> None:
    with (
        serve(ViewCollector(), port=0) as taken,
        pytest.raises(ConfigError, match=r"--metrics-port: .* choose another port"),
    ):
        run(job(taken.port), lambda: None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hicache_storage.metrics", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("metrics"))):
        run(job(free_port()), lambda: None)
