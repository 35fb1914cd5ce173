"""Copy a collector's metrics to the files of prometheus_client's multiprocess mode, which SGLang uses.

The process that Prometheus scrapes reads these files, and cannot see collectors in other processes. So a
thread copies the figures to the files each second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

logger: logging.Logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_GAUGE_MODE = "mostrecent"


def is_multiprocess() -> bool:
    """Return True if this process's metrics are files that another process reads."""
    return bool(getattr(values.ValueClass, "_multiprocess", False))


class MultiprocessPublisher:
    """A thread that copies a collector's metrics to this process's files until `close`."""

    def __init__(self, collector: Collector, *, interval_s: float = _INTERVAL_S) -> None:
        """Start the thread `hicache-metrics`."""
        self._collector = collector
        self._interval_s = interval_s
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._gauges: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hicache-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Copy the metrics a last time, and end the thread. Idempotent."""
        self._closing.set()
        self._thread.join(timeout_s)

    def publish(self) -> None:
        """Copy the metrics now."""
        with self._lock:
            self._copy()

    def _copy(self) -> None:
        shown: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        now_s = time.time()
        for metric in self._collector.collect():
            for sample, value in _file_samples(metric):
                key = (sample.name, tuple(sample.labels.items()))
                shown.add(key)
                self._value(metric, sample, key).set(value, timestamp=now_s)
        for key in self._gauges - shown:  # a file would keep the last value
            self._values[key].set(math.nan, timestamp=now_s)

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._closing.wait(self._interval_s)
            try:
                self.publish()
            except Exception:  # the metrics may be complete again in the next second
                logger.debug("the metrics could not be published", exc_info=True)

    def _value(
        self, metric: Metric, sample: Sample, key: tuple[str, tuple[tuple[str, str], ...]]
    ) -> Any:
        if key not in self._values:
            self._values[key] = values.ValueClass(
                metric.type,
                metric.name,
                sample.name,
                tuple(sample.labels),
                tuple(sample.labels.values()),
                metric.documentation,
                multiprocess_mode=_GAUGE_MODE,
            )
            if metric.type == "gauge":
                self._gauges.add(key)
        return self._values[key]


def _file_samples(metric: Metric) -> Iterator[tuple[Sample, float]]:
    """Yield each sample with its value in a file, where a bucket counts only its own calls."""
    below = 0.0
    for sample in metric.samples:
        if metric.type == "histogram" and sample.name.endswith("_count"):
            continue  # the reader adds up the buckets
        if "le" in sample.labels:
            yield sample, sample.value - below
            below = 0.0 if sample.labels["le"] == "+Inf" else sample.value
        else:
            yield sample, sample.value
