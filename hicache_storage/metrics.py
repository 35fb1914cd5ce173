"""The Prometheus names of this package, in one place. Needs the extra `metrics`.

    prometheus_client.REGISTRY.register(CacheCollector(store, controller, labels={"rank": "0"}))

Figures are read when they are scraped; nothing on the hot path knows of Prometheus.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hicache_storage.errors import HiCacheError
from hicache_storage.storage import StorageStats
from hicache_storage.transfer import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from hicache_storage.controller import CacheController
    from hicache_storage.controller.handoff import HandoffReceiver, HandoffSender
    from hicache_storage.page_store import PageStore

_BREAKER_STATES = ("closed", "open", "half_open")


class CacheCollector(Collector):
    """One page store, and the controller and the sides of hand-offs above it where there are any."""

    def __init__(
        self,
        store: PageStore,
        controller: CacheController | None = None,
        *,
        handoffs: Sequence[HandoffSender | HandoffReceiver] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._controller = controller
        self._handoffs = handoffs
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        yield from self._page_store()
        yield from self._storage()
        if self._controller is not None:
            yield self._events(
                "hicache_controller",
                "What the controller did, in pages unless the event's name says otherwise",
                self._controller.stats(),
            )
        if self._handoffs:
            counts = sum((Counter(side.stats()) for side in self._handoffs), Counter[str]())
            yield self._events(
                "hicache_handoff", "Requests handed over or awaited, by how they ended", counts
            )

    def _page_store(self) -> Iterator[Metric]:
        stats = self._store.stats()
        names = [*self._labels, "direction"]
        pages = CounterMetricFamily(
            "hicache_pages", "Pages by direction and verdict", labels=[*names, "verdict"]
        )
        nbytes = CounterMetricFamily(
            "hicache_payload_bytes", "Payload bytes that were moved and proved", labels=names
        )
        for direction in ("load", "save"):
            values = [*self._labels.values(), direction]
            nbytes.add_metric(values, stats.get(f"{direction}_nbytes", 0))
            for verdict in Verdict:
                count = stats.get(f"{direction}_{verdict.value}", 0)
                pages.add_metric([*values, verdict.value], count)
        yield pages
        yield nbytes
        yield self._counter(
            "hicache_wrong_pages_deleted",
            "Stored pages that were proved wrong and deleted",
            stats.get("wrong_pages_deleted", 0),
        )
        yield self._counter(
            "hicache_match_failed",
            "Questions what the storage has that it could not answer",
            stats.get("match_failed", 0),
        )
        yield self._counter(
            "hicache_breaker_opened", "Times the breaker opened", stats["breaker_opened"]
        )
        state = GaugeMetricFamily(
            "hicache_breaker_state", "1 for the state it is in", labels=[*self._labels, "state"]
        )
        for name in _BREAKER_STATES:
            state.add_metric(
                [*self._labels.values(), name], float(name == self._store.breaker.state)
            )
        yield state

    def _storage(self) -> Iterator[Metric]:
        try:
            stats = self._store.storage.stats()
        except HiCacheError:  # closed, or away: the other figures are still worth having
            stats = StorageStats()
        for name, value in (
            ("pages", stats.pages),
            ("bytes", stats.nbytes),
            ("capacity_bytes", stats.capacity_nbytes),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(
                    f"hicache_storage_{name}", "As the storage counts them", labels=[*self._labels]
                )
                gauge.add_metric([*self._labels.values()], value)
                yield gauge
        yield self._events("hicache_storage", "The storage's own counters by name", stats.counters)

    def _events(self, prefix: str, help_text: str, counts: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(f"{prefix}_events", help_text, labels=[*self._labels, "event"])
        for event, count in counts.items():
            family.add_metric([*self._labels.values(), event], count)
        return family

    def _counter(self, name: str, help_text: str, count: int) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], count)
        return family
