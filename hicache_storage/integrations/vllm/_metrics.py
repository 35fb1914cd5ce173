"""Publish a tier's metrics through vLLM: pages by verdict, latency, usage and breakers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hicache_storage.page_store.counters import nbytes_counter
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.integrations._jobs import JobRunner
    from hicache_storage.integrations.vllm._engine import EngineTypes, Stats
    from hicache_storage.page_store import PageStore

_PREFIX = "vllm:kv_offload_hicache_"
PAGES = f"{_PREFIX}pages"
BYTES = f"{_PREFIX}bytes"
UNUSED_LOADS = f"{_PREFIX}load_pages_unused"
LOOKUP_PAGES = f"{_PREFIX}lookup_pages"
ERRORS = f"{_PREFIX}errors"
CONNECTED = f"{_PREFIX}connected"
BREAKER = f"{_PREFIX}breaker_open"
STORE_BYTES = f"{_PREFIX}store_bytes"
STORE_CAPACITY = f"{_PREFIX}store_capacity_bytes"
STORE_PAGES = f"{_PREFIX}store_pages"
QUEUED = f"{_PREFIX}queued_bytes"
PRIVATE = f"{_PREFIX}private_bytes"
SECONDS = f"{_PREFIX}seconds"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_OPEN = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
_PERIOD_S = 1.0
_LABELS = ("tier", "backend")
"""The labels of each metric. `tier` is vLLM's own, such as "1:HiCacheTier"."""


def definitions(engine: EngineTypes) -> dict[str, Any]:
    """Return the definitions of the metrics for vLLM's Prometheus exporter."""

    def counter(text: str, *labels: str) -> Any:
        return engine.counter(documentation=text, labelnames=(*_LABELS, *labels))

    def gauge(text: str, *labels: str) -> Any:
        return engine.gauge(documentation=text, labelnames=(*_LABELS, *labels))

    seconds = "Time of a job, by operation: lookup as the scheduler sees it, load, store."
    return {
        PAGES: counter("Pages of loads and stores, by verdict.", "operation", "verdict"),
        UNUSED_LOADS: counter("Pages that were loaded and left host memory before their use."),
        BYTES: counter("Payload bytes that were loaded and stored.", "operation"),
        LOOKUP_PAGES: counter("Pages of lookups, by answer.", "answer"),
        ERRORS: counter("Errors of the adapter itself, each of which was a miss."),
        CONNECTED: gauge("1 if the store was opened."),
        BREAKER: gauge("1 if calls are refused after failures, 0.5 for a trial.", "direction"),
        STORE_BYTES: gauge("Bytes in the store, if it knows them."),
        STORE_CAPACITY: gauge("Capacity of the store in bytes, if it has one."),
        STORE_PAGES: gauge("Pages in the store, if it knows them."),
        QUEUED: gauge("Bytes of stores that wait."),
        PRIVATE: gauge("Bytes of private memory."),
        SECONDS: engine.histogram(
            documentation=seconds, labelnames=(*_LABELS, "operation"), buckets=_BUCKETS
        ),
    }


class TierMetrics:
    """The observations since the last `take`. Not thread-safe: vLLM's lock guards it."""

    def __init__(self, engine: EngineTypes, tier: str, backend: str) -> None:
        self.errors = 0
        self.unused_loads = 0
        self._engine = engine
        self._labels = (tier, backend)
        self._reported: dict[str, int] = {}
        self._seconds: list[tuple[str, float]] = []
        self._taken_s = 0.0

    def observe(self, operation: str, elapsed_s: float) -> None:
        """Record how long a job took."""
        self._seconds.append((operation, elapsed_s))

    def take(self, runner: JobRunner | None, store: PageStore | None) -> Stats | None:
        """Return the observations, or None if nothing is new and the last result is recent."""
        now_s = time.monotonic()
        if not self._seconds and now_s < self._taken_s + _PERIOD_S:
            return None
        self._taken_s = now_s
        stats = self._engine.stats()
        for operation, elapsed_s in self._seconds:
            stats.observe_histogram(SECONDS, elapsed_s, (*self._labels, operation))
        self._seconds = []
        self._count(stats, ERRORS, self.errors)
        self._count(stats, UNUSED_LOADS, self.unused_loads)
        stats.set_gauge(CONNECTED, float(runner is not None), self._labels)
        if runner is not None and store is not None:
            self._add_jobs(stats, runner.stats())
            self._add_store(stats, store)
        return stats

    def _add_jobs(self, stats: Stats, counters: Mapping[str, int]) -> None:
        for operation in ("load", "store"):
            for verdict in Verdict:
                value = counters.get(f"{operation}_pages_{verdict.value}", 0)
                self._count(stats, PAGES, value, operation, verdict.value)
        asked = counters.get("lookup_pages", 0)
        present = counters.get("lookup_pages_present", 0)
        unanswered = counters.get("lookup_pages_unanswered", 0)
        self._count(stats, LOOKUP_PAGES, present, "present")
        self._count(stats, LOOKUP_PAGES, unanswered, "unanswered")
        self._count(stats, LOOKUP_PAGES, asked - present - unanswered, "absent")
        stats.set_gauge(QUEUED, counters.get("queued_store_nbytes", 0), self._labels)
        stats.set_gauge(PRIVATE, counters.get("private_nbytes", 0), self._labels)

    def _add_store(self, stats: Stats, store: PageStore) -> None:
        counters = store.stats()
        self._count(stats, BYTES, counters.get(nbytes_counter("load"), 0), "load")
        self._count(stats, BYTES, counters.get(nbytes_counter("save"), 0), "store")
        for direction in ("reads", "writes"):
            state = getattr(store.breaker, direction).state
            stats.set_gauge(BREAKER, _OPEN[state], (*self._labels, direction))
        usage = store.storage.stats()
        for name, value in (
            (STORE_BYTES, usage.nbytes),
            (STORE_CAPACITY, usage.capacity_nbytes),
            (STORE_PAGES, usage.pages),
        ):
            if value is not None:
                stats.set_gauge(name, value, self._labels)

    def _count(self, stats: Stats, name: str, total: int, *labels: str) -> None:
        """Add to a counter how much its total has grown since the last call."""
        key = "/".join((name, *labels))
        increase = total - self._reported.get(key, 0)
        if increase > 0:
            self._reported[key] = total
            stats.increase_counter(name, increase, (*self._labels, *labels))
