"""Prometheus collectors with all metrics of this package.

    collector = CacheCollector(store, controller, labels={"rank": "0"})
    collector.add(other_store, other_controller, labels={"rank": "1"})
    prometheus_client.REGISTRY.register(collector)

A registry has only one collector, even if a process has several caches, because Prometheus's format
describes each metric once. The collector reads the figures during a scrape, so no hot path uses
Prometheus.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from hicache_storage.metrics.families import Families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric

    from hicache_storage.controller import CacheController
    from hicache_storage.handoff import HandoffReceiver, HandoffSender
    from hicache_storage.page_store import PageStore


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """The parts of one cache that a scrape reads."""

    store: PageStore | None = None
    """The page store. None until there is one."""
    controller: CacheController | None = None
    handoffs: Sequence[HandoffSender | HandoffReceiver] = ()
    attached: bool | None = None
    """True while an engine's adapter uses the store. None: there is no adapter."""
    engine: Mapping[str, int] | None = None
    """The counters of an engine's adapter."""


class ViewCollector(Collector):
    """The metrics of caches whose parts may change between scrapes. Thread-safe."""

    def __init__(self, label_names: Iterable[str] = ()) -> None:
        self._names = sorted(label_names)
        self._lock = threading.Lock()
        self._views: dict[tuple[str, ...], Callable[[], CacheView]] = {}

    def watch(self, view: Callable[[], CacheView], labels: Mapping[str, str]) -> None:
        """Call `view` in each scrape from now on, and show the cache under `labels`.

        Raises:
            ValueError: The label names differ from the collector's, or another cache has the same
                values.
        """
        values = self._values(labels)
        with self._lock:
            if values in self._views:
                raise ValueError(
                    f"a cache with the labels {dict(labels)} exists already: give this one other"
                    " labels"
                )
            self._views[values] = view

    def unwatch(self, labels: Mapping[str, str]) -> None:
        """Forget the cache under `labels`, if there is one."""
        with self._lock:
            self._views.pop(self._values(labels), None)

    def describe(self) -> Iterator[Metric]:
        """Yield all metrics without samples, so that a registry refuses a second collector."""
        return iter(Families(self._names).metrics)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current samples."""
        families = Families(self._names)
        with self._lock:
            views = list(self._views.items())
        for labels, view in views:
            _show(families, view(), labels)
        return (metric for metric in families.metrics if metric.samples)

    def _values(self, labels: Mapping[str, str]) -> tuple[str, ...]:
        if sorted(labels) != self._names:
            raise ValueError(
                f"the caches of one collector must have the same label names: {self._names},"
                f" not {sorted(labels)}"
            )
        return tuple(labels[name] for name in self._names)


class CacheCollector(ViewCollector):
    """The metrics of page stores, and of controllers and hand-offs that use them."""

    def __init__(
        self,
        store: PageStore,
        controller: CacheController | None = None,
        *,
        handoffs: Sequence[HandoffSender | HandoffReceiver] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(labels or {})
        self.add(store, controller, handoffs=handoffs, labels=labels)

    def add(
        self,
        store: PageStore,
        controller: CacheController | None = None,
        *,
        handoffs: Sequence[HandoffSender | HandoffReceiver] = (),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Add another cache, which is shown from the next scrape on.

        Raises:
            ValueError: The label names differ from those of the other caches, or another cache has
                the same values.
        """
        view = CacheView(store=store, controller=controller, handoffs=handoffs)
        self.watch(lambda: view, labels or {})


def _show(families: Families, view: CacheView, labels: Sequence[str]) -> None:
    """Add the samples of one cache."""
    if view.store is not None:
        families.add_store(view.store, labels)
    if view.attached is not None:
        families.add_attached(labels, attached=view.attached)
    if view.engine is not None:
        families.add_engine(view.engine, labels)
    if view.controller is not None:
        families.add_controller(view.controller.stats(), labels)
    counts = sum((Counter(side.stats()) for side in view.handoffs), Counter[str]())
    families.add_handoffs(counts, labels)
