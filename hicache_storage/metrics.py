"""A Prometheus collector with all metrics of this package. Needs the extra `metrics`.

    collector = CacheCollector(store, controller, labels={"rank": "0"})
    collector.add(other_store, other_controller, labels={"rank": "1"})
    prometheus_client.REGISTRY.register(collector)

A registry has one collector, also if a process has several caches, because Prometheus's format
describes a metric once. The collector reads the figures during a scrape. No hot path uses
Prometheus.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.breaker import STATES
from hicache_storage.page_store.counters import (
    BREAKER_OPENED,
    DIRECTIONS,
    MATCH_FAILED,
    WRONG_PAGES_DELETED,
    nbytes_counter,
    pages_counter,
)
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import StorageStats

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from hicache_storage.controller import CacheController
    from hicache_storage.handoff import HandoffReceiver, HandoffSender
    from hicache_storage.page_store import PageStore


_VERDICTS = [verdict for verdict in Verdict if verdict is not Verdict.NOT_ADMITTED]
"""The verdicts of a page store."""


@dataclass(frozen=True, slots=True)
class _Cache:
    """One page store, with the controller and the sides of hand-offs above it, if there are any."""

    store: PageStore
    controller: CacheController | None
    handoffs: Sequence[HandoffSender | HandoffReceiver]
    labels: tuple[str, ...]
    """The values of the labels, in the order of the collector's names."""


class CacheCollector(Collector):
    """The metrics of page stores, and of the controllers and the sides of hand-offs above them."""

    def __init__(
        self,
        store: PageStore,
        controller: CacheController | None = None,
        *,
        handoffs: Sequence[HandoffSender | HandoffReceiver] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._names = sorted(labels or {})
        self._caches: tuple[_Cache, ...] = ()
        self.add(store, controller, handoffs=handoffs, labels=labels)

    def add(
        self,
        store: PageStore,
        controller: CacheController | None = None,
        *,
        handoffs: Sequence[HandoffSender | HandoffReceiver] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add another cache, from the next scrape on.

        Raises:
            ValueError: The names of its labels differ from those of the other caches, or another
            cache has
                the same values.
        """
        labels = labels or {}
        if sorted(labels) != self._names:
            raise ValueError(
                f"the caches of one collector have the same label names: {self._names}, not"
                f" {sorted(labels)}"
            )
        values = tuple(labels[name] for name in self._names)
        if any(values == cache.labels for cache in self._caches):
            raise ValueError(
                f"a cache with the labels {dict(labels)} is there: give this one others"
            )
        self._caches += (_Cache(store, controller, handoffs, values),)

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics without samples, so that a registry refuses a second collector."""
        families = _Families(self._names)
        return iter(families.metrics)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current samples."""
        families = _Families(self._names)
        for cache in self._caches:
            families.show(cache)
        return (metric for metric in families.metrics if metric.samples)


class _Families:
    """The metrics of one scrape. Each is described once, with the samples of all caches."""

    def __init__(self, names: Sequence[str]) -> None:
        self.metrics: list[Metric] = []
        """All metrics, with the samples that were added so far."""

        def counter(name: str, help_text: str, *labels: str) -> CounterMetricFamily:
            family = CounterMetricFamily(name, help_text, labels=[*names, *labels])
            self.metrics.append(family)
            return family

        def gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
            family = GaugeMetricFamily(name, help_text, labels=[*names, *labels])
            self.metrics.append(family)
            return family

        self.pages = counter(
            "hicache_pages", "Pages by direction and verdict", "direction", "verdict"
        )
        self.payload = counter(
            "hicache_payload_bytes", "Payload bytes that were moved and proved", "direction"
        )
        self.wrong = counter(
            "hicache_wrong_pages_deleted", "Stored pages that were proved wrong and deleted"
        )
        self.match_failed = counter(
            "hicache_match_failed", "Questions what the storage has that it could not answer"
        )
        self.opened = counter("hicache_breaker_opened", "Times a breaker opened")
        self.state = gauge(
            "hicache_breaker_state", "1 for the worse state of both directions", "state"
        )
        self.turned_away = gauge(
            "hicache_breaker_open",
            "1 where a direction's breaker is not closed",
            "direction",
        )
        self.gauges = {
            name: gauge(f"hicache_storage_{name}", "As the storage counts them")
            for name in ("pages", "bytes", "capacity_bytes")
        }
        self.storage = counter(
            "hicache_storage_events", "The storage's own counters by name", "event"
        )
        self.controller = counter(
            "hicache_controller_events",
            "What the controller did, in pages unless the event's name says otherwise",
            "event",
        )
        self.handoff = counter(
            "hicache_handoff_events", "Requests handed over or awaited, by how they ended", "event"
        )

    def show(self, cache: _Cache) -> None:
        """Add the samples of one cache."""
        self._page_store(cache.store, cache.labels)
        self._storage(cache.store, cache.labels)
        if cache.controller is not None:
            _events(self.controller, cache.labels, cache.controller.stats())
        counts = sum((Counter(side.stats()) for side in cache.handoffs), Counter[str]())
        _events(self.handoff, cache.labels, counts)

    def _page_store(self, store: PageStore, labels: tuple[str, ...]) -> None:
        stats = store.stats()
        for direction in DIRECTIONS:
            nbytes = stats.get(nbytes_counter(direction), 0)
            self.payload.add_metric([*labels, direction], nbytes)
            for verdict in _VERDICTS:
                count = stats.get(pages_counter(direction, verdict), 0)
                self.pages.add_metric([*labels, direction, verdict.value], count)
        self.wrong.add_metric(labels, stats.get(WRONG_PAGES_DELETED, 0))
        self.match_failed.add_metric(labels, stats.get(MATCH_FAILED, 0))
        self.opened.add_metric(labels, stats[BREAKER_OPENED])
        breakers = store.breaker
        state = breakers.state
        for name in STATES:
            self.state.add_metric([*labels, name], float(name == state))
        for direction, breaker in zip(DIRECTIONS, (breakers.reads, breakers.writes), strict=True):
            self.turned_away.add_metric([*labels, direction], float(breaker.state != "closed"))

    def _storage(self, store: PageStore, labels: tuple[str, ...]) -> None:
        try:
            stats = store.storage.stats()
        except HiCacheError:  # a closed or unreachable storage does not hide the other figures
            stats = StorageStats()
        values = (stats.pages, stats.nbytes, stats.capacity_nbytes)
        for gauge, value in zip(self.gauges.values(), values, strict=True):
            if value is not None:
                gauge.add_metric(labels, value)
        _events(self.storage, labels, stats.counters)


def _events(
    family: CounterMetricFamily, labels: tuple[str, ...], counts: Mapping[str, int]
) -> None:
    for event, count in counts.items():
        family.add_metric([*labels, event], count)
