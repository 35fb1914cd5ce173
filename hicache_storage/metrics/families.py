"""Describe the metrics of one scrape, and add the samples of all caches to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from hicache_storage.composition.parts import all_parts, split_counter, stats_of
from hicache_storage.composition.storage import ABSENT
from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.breaker import STATES
from hicache_storage.page_store.call_durations import BUCKETS_S, OPERATIONS
from hicache_storage.page_store.counters import (
    ANSWERS,
    BREAKER_OPENED,
    DIRECTIONS,
    MATCH_FAILED,
    WRONG_PAGES_DELETED,
    answers_counter,
    nbytes_counter,
    pages_counter,
)
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric

    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.call_durations import Histogram
    from hicache_storage.storage import StorageStats

_VERDICTS = [verdict for verdict in Verdict if verdict is not Verdict.NOT_ADMITTED]
"""The verdicts that a page store returns."""
_LIMITS = [*map(str, BUCKETS_S), "+Inf"]
_ENGINE_GAUGES = {
    "queued_store_nbytes": ("hicache_queued_bytes", "Payload bytes that wait to be stored"),
    "private_nbytes": (
        "hicache_private_memory_bytes",
        "Memory of the adapter for stores that do not get the engine's own memory",
    ),
    "private_nbytes_used": (
        "hicache_private_memory_used_bytes",
        "The part of hicache_private_memory_bytes that is in use",
    ),
    "open_spaces": ("hicache_open_spaces", "Key spaces that the adapter has opened to store pages"),
}
"""Values among an adapter's counters that can also fall."""


class Families:
    """The metrics of one scrape. Each metric is described once, and has the samples of all caches."""

    def __init__(self, names: Sequence[str]) -> None:
        """Describe all metrics. Every sample has the labels `names`."""
        self.metrics: list[Metric] = []
        """All metrics, with the samples added so far."""
        self._names = list(names)
        self._describe_store()
        self._describe_storage()
        self._describe_engine()

    def add_store(self, store: PageStore, labels: Sequence[str]) -> None:
        """Add the samples of a page store and its storage."""
        self._add_calls(store, labels)
        self._add_breakers(store, labels)
        self._add_storage(store, labels)

    def add_attached(self, labels: Sequence[str], *, attached: bool) -> None:
        """Add whether an engine's store is attached."""
        self._attached.add_metric(labels, float(attached))

    def add_engine(self, counts: Mapping[str, int], labels: Sequence[str]) -> None:
        """Add the counters and present values of an adapter."""
        for name, gauge in self._engine_gauges.items():
            if name in counts:
                gauge.add_metric(labels, counts[name])
        events = {name: counts[name] for name in counts if name not in self._engine_gauges}
        _add_events(self._engine, labels, events)

    def add_controller(self, counts: Mapping[str, int], labels: Sequence[str]) -> None:
        """Add the counters of a controller."""
        _add_events(self._controller, labels, counts)

    def add_handoffs(self, counts: Mapping[str, int], labels: Sequence[str]) -> None:
        """Add the counters of hand-off senders and receivers."""
        _add_events(self._handoff, labels, counts)

    # --- descriptions ----------------------------------------------------------------------------

    def _describe_store(self) -> None:
        counter, gauge = self._counter, self._gauge
        self._pages = counter(
            "hicache_pages", "Pages by direction and verdict", "direction", "verdict"
        )
        self._payload = counter(
            "hicache_payload_bytes", "Payload bytes that were moved and checked", "direction"
        )
        self._wrong = counter(
            "hicache_wrong_pages_deleted", "Wrong pages that were found in the storage and deleted"
        )
        self._match_pages = counter(
            "hicache_match_pages", "Pages that were looked up, by the storage's answer", "answer"
        )
        self._match_failed = counter(
            "hicache_match_failed", "Look-ups that the storage could not answer"
        )
        self._seconds = {
            operation: self._histogram(
                f"hicache_{operation}_seconds",
                f"Time of a {operation}, by the worst verdict of its pages",
            )
            for operation in OPERATIONS
        }
        self._opened = counter("hicache_breaker_opened", "Times a breaker opened")
        self._state = gauge(
            "hicache_breaker_state", "1 for the worse state of both directions", "state"
        )
        self._turned_away = gauge(
            "hicache_breaker_open", "1 if a direction's breaker is not closed", "direction"
        )

    def _describe_storage(self) -> None:
        self._storage_gauges = {
            name: self._gauge(
                f"hicache_storage_{name}", "What the storage holds or can hold, by its own count"
            )
            for name in ("pages", "bytes", "capacity_bytes")
        }
        self._storage = self._counter(
            "hicache_storage_events",
            "The storage's own counters by name, and by the part of the storage that they are about",
            "tier",
            "event",
        )
        self._tier_gauges = {
            name: self._gauge(
                f"hicache_tier_{name}", "What a part of the storage holds or can hold", "tier"
            )
            for name in ("pages", "bytes", "capacity_bytes")
        }
        self._tier_state = self._gauge(
            "hicache_tier_state", "1 for the state of a part's breaker", "tier", "state"
        )

    def _describe_engine(self) -> None:
        self._controller = self._counter(
            "hicache_controller_events",
            "What the controller did, in pages unless the event's name says otherwise",
            "event",
        )
        self._handoff = self._counter(
            "hicache_handoff_events", "Requests handed over or awaited, by how they ended", "event"
        )
        self._attached = self._gauge(
            "hicache_store_attached", "1 while the engine's adapter uses its store"
        )
        self._engine = self._counter(
            "hicache_engine_events", "What the engine's adapter did, by name", "event"
        )
        self._engine_gauges = {
            name: self._gauge(*description) for name, description in _ENGINE_GAUGES.items()
        }

    def _counter(self, name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=[*self._names, *labels])
        self.metrics.append(family)
        return family

    def _gauge(self, name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help_text, labels=[*self._names, *labels])
        self.metrics.append(family)
        return family

    def _histogram(self, name: str, help_text: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, help_text, labels=[*self._names, "verdict"])
        self.metrics.append(family)
        return family

    # --- samples ---------------------------------------------------------------------------------

    def _add_calls(self, store: PageStore, labels: Sequence[str]) -> None:
        stats = store.stats()
        for direction in DIRECTIONS:
            nbytes = stats.get(nbytes_counter(direction), 0)
            self._payload.add_metric([*labels, direction], nbytes)
            for verdict in _VERDICTS:
                count = stats.get(pages_counter(direction, verdict), 0)
                self._pages.add_metric([*labels, direction, verdict.value], count)
        for answer in ANSWERS:
            self._match_pages.add_metric([*labels, answer], stats.get(answers_counter(answer), 0))
        self._wrong.add_metric(labels, stats.get(WRONG_PAGES_DELETED, 0))
        self._match_failed.add_metric(labels, stats.get(MATCH_FAILED, 0))
        self._opened.add_metric(labels, stats[BREAKER_OPENED])
        for (operation, worst), histogram in store.durations().items():
            self._seconds[operation].add_metric(
                [*labels, worst.value], _cumulative(histogram), histogram.total_s
            )

    def _add_breakers(self, store: PageStore, labels: Sequence[str]) -> None:
        breakers = store.breaker
        state = breakers.state
        for name in STATES:
            self._state.add_metric([*labels, name], float(name == state))
        for direction, breaker in zip(DIRECTIONS, (breakers.reads, breakers.writes), strict=True):
            self._turned_away.add_metric([*labels, direction], float(breaker.state != "closed"))

    def _add_storage(self, store: PageStore, labels: Sequence[str]) -> None:
        try:
            parts = all_parts(store.storage)
        except HiCacheError:
            parts = {}
        stats = stats_of(store.storage)
        _add_content(self._storage_gauges.values(), labels, stats)
        for name, part in parts.items():
            _add_content(self._tier_gauges.values(), [*labels, name], stats_of(part))
        for name, state in stats.part_states.items():
            for each in (*STATES, ABSENT):
                self._tier_state.add_metric([*labels, name, each], float(each == state))
        for counter, count in stats.counters.items():
            self._storage.add_metric([*labels, *split_counter(counter, parts)], count)


def _add_content(
    gauges: Iterable[GaugeMetricFamily], labels: Sequence[str], stats: StorageStats
) -> None:
    values = (stats.pages, stats.nbytes, stats.capacity_nbytes)
    for gauge, value in zip(gauges, values, strict=True):
        if value is not None:
            gauge.add_metric(labels, value)


def _add_events(
    family: CounterMetricFamily, labels: Sequence[str], counts: Mapping[str, int]
) -> None:
    for event, count in counts.items():
        family.add_metric([*labels, event], count)


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the upper limit of each bucket, with the number of calls up to it."""
    calls = 0
    buckets: list[tuple[str, float]] = []
    for limit, count in zip(_LIMITS, histogram.counts, strict=True):
        calls += count
        buckets.append((limit, calls))
    return buckets
