"""Prometheus metrics of page stores, controllers and hand-offs. Needs the extra `metrics`.

    collector = CacheCollector(store, controller, labels={"backend": "redis"})
    with serve(collector, port=9401) as server:
        ...  # Prometheus scrapes server.url

docs/metrics.md lists the metrics.
"""

from __future__ import annotations

from hicache_storage.metrics.collector import CacheCollector, CacheView, ViewCollector
from hicache_storage.metrics.server import MetricsServer, serve

__all__ = ["CacheCollector", "CacheView", "MetricsServer", "ViewCollector", "serve"]
