"""Metrics in the files of prometheus_client's multiprocess mode, tested in separate processes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from servers import ROOT

from hicache_storage.metrics.multiprocess import is_multiprocess

_PUBLISH = """
import sys
sys.path[:0] = ["tests/support", "backends"]
from framed import TARGET, framed
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from hicache_storage.metrics import CacheView, ViewCollector
from hicache_storage.metrics.multiprocess import MultiprocessPublisher, is_multiprocess
from hicache_storage.page_store import PageStore, Transfer

assert is_multiprocess()
with PageStore(MemoryStorage()) as store:
    collector = ViewCollector(["rank"])
    collector.watch(lambda: CacheView(store=store, attached=True), {"rank": sys.argv[1]})
    store.open_space(TARGET)
    publisher = MultiprocessPublisher(collector, interval_s=60)
    for number in range(3):
        store.save([Transfer(TARGET, [hash_of(number)], [framed(1)])])
    if sys.argv[2] == "detach":
        publisher.close()
        collector.unwatch({"rank": sys.argv[1]})
        publisher.publish()
    publisher.close()
"""


def publish(directory: Path, rank: int, *, detach: bool = False) -> None:
    """Publish the metrics of a store from another process."""
    subprocess.run(
        [sys.executable, "-c", _PUBLISH, str(rank), "detach" if detach else "stay"],
        cwd=ROOT,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)},
        timeout=60,
        check=True,
    )


def read(directory: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(directory))  # type: ignore[no-untyped-call]  # it has no types
    return registry


def test_a_process_without_the_mode_has_no_files() -> None:
    assert not is_multiprocess()


def test_another_process_reads_the_metrics_of_all_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        publish(tmp_path, rank)
    registry = read(tmp_path)

    for label in ("0", "1"):
        labels = {"rank": label}
        saved = {**labels, "direction": "save", "verdict": "ok"}
        assert 3 == registry.get_sample_value("hicache_pages_total", saved)
        assert 1 == registry.get_sample_value("hicache_store_attached", labels)
        closed = {**labels, "state": "closed"}
        assert 1 == registry.get_sample_value("hicache_breaker_state", closed)


def test_a_histogram_is_that_of_the_process(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    registry = read(tmp_path)
    labels = {"rank": "0", "verdict": "ok"}

    assert 3 == registry.get_sample_value("hicache_save_seconds_count", labels)
    everything = {**labels, "le": "+Inf"}
    assert 3 == registry.get_sample_value("hicache_save_seconds_bucket", everything)
    total_s = registry.get_sample_value("hicache_save_seconds_sum", labels)
    assert total_s is not None
    assert total_s > 0


def test_a_gauge_without_a_value_is_not_a_number(tmp_path: Path) -> None:
    publish(tmp_path, 0, detach=True)
    registry = read(tmp_path)

    attached = registry.get_sample_value("hicache_store_attached", {"rank": "0"})
    assert attached is not None
    assert math.isnan(attached)
    saved = {"rank": "0", "direction": "save", "verdict": "ok"}
    assert 3 == registry.get_sample_value("hicache_pages_total", saved)
