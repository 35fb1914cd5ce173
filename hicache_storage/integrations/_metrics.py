"""Publish the metrics of all adapters in this process, in the engine's registry and on HTTP ports.

A process has one collector, because a registry refuses a second one with the same metrics. Adapters
with the same port share its endpoint. The labels of an adapter are `engine`, `backend` and `rank`. The
second store of one backend in a process gets a number, for example `redis-2`.
"""

from __future__ import annotations

import enum
import itertools
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import ConfigError, install_command

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from hicache_storage.integrations._metrics_settings import MetricsSettings
    from hicache_storage.metrics import CacheView, MetricsServer, ViewCollector

_LABELS = ("backend", "engine", "rank")
_EXTRA = f'they need the extra "metrics": {install_command("metrics")}'


class EngineRegistry(enum.Enum):
    """The place from which the engine itself publishes metrics."""

    NONE = "none"
    DEFAULT = "default"
    """prometheus_client's `REGISTRY`."""
    PROCESSES = "processes"
    """The files of prometheus_client's multiprocess mode, if the engine uses it, else `REGISTRY`."""


class AdapterMetrics:
    """The metrics of one adapter. No method raises, because an engine can run without metrics."""

    def __init__(
        self,
        settings: MetricsSettings,
        view: Callable[[], CacheView],
        *,
        engine: str,
        backend: str,
        logger: logging.Logger,
        rank: int = 0,
        registry: EngineRegistry = EngineRegistry.NONE,
    ) -> None:
        """Show the adapter in every scrape from now on.

        Args:
            settings: The port and the address that metrics are served on.
            view: A function that returns the parts of the adapter at each scrape, and never raises.
            engine: The value of the label `engine`.
            backend: The backend's name. A number is added if another adapter has the same labels.
            logger: For the reason, if there are no metrics.
            rank: The number of this process in the engine. The number is added to the port.
            registry: The engine's own registry.
        """
        self._labels: dict[str, str] | None = None
        self._address: tuple[str, int] | None = None
        self._pid = os.getpid()
        self._logger = logger
        port = None if settings.metrics_port is None else settings.metrics_port + rank
        try:
            process = _PROCESS.get()
            labels = {"engine": engine, "backend": backend, "rank": str(rank)}
            self._labels = process.watch(view, labels)
            process.register(registry)
            if port is not None:
                process.open(settings.metrics_host, port)
                self._address = settings.metrics_host, port
                logger.info("metrics: http://%s:%d/metrics", settings.metrics_host, port)
        except ImportError:
            if port is not None:
                logger.error("metrics cannot be served: %s", _EXTRA)  # noqa: TRY400 - no traceback helps
        except ConfigError as error:
            logger.error("%s (this port is metrics_port plus the rank, %d)", error, rank)  # noqa: TRY400 - as above
        except Exception:
            logger.exception("metrics cannot be served")

    def close(self) -> None:
        """Remove the adapter, and close its port if no other adapter uses it.

        Idempotent. Do nothing in a forked child.
        """
        if self._pid != os.getpid():
            return
        process = _PROCESS.get()
        address, self._address = self._address, None
        labels, self._labels = self._labels, None
        try:
            if labels is not None:
                process.unwatch(labels)
            if address is not None:
                process.release(*address)
        except Exception:
            self._logger.exception("the metrics could not be closed")


class _ProcessMetrics:
    """The collector of a process, its registration and its endpoints. Thread-safe.

    prometheus_client is imported only when the first adapter is added.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collector: ViewCollector | None = None
        self._adapters = 0
        self._registration: _Registration | None = None
        self._servers: dict[tuple[str, int], tuple[MetricsServer, int]] = {}

    def watch(self, view: Callable[[], CacheView], labels: Mapping[str, str]) -> dict[str, str]:
        """Add an adapter. Return its labels, with a number appended to the backend if needed.

        Raises:
            ImportError: prometheus_client is not installed.
        """
        from hicache_storage.metrics import ViewCollector  # noqa: PLC0415 - the extra is optional

        with self._lock:
            collector = self._collector = self._collector or ViewCollector(_LABELS)
            for number in itertools.count(1):
                suffix = f"-{number}" if number > 1 else ""
                numbered = {**labels, "backend": f"{labels['backend']}{suffix}"}
                with suppress(ValueError):  # another adapter has these labels
                    collector.watch(view, numbered)
                    self._adapters += 1
                    return numbered
        raise AssertionError("there is always a next number")

    def unwatch(self, labels: Mapping[str, str]) -> None:
        """Remove an adapter.

        With the last adapter, also remove the collector from the engine's registry.
        """
        with self._lock:
            if self._registration is not None:
                self._registration.publish()
            if self._collector is not None:
                self._collector.unwatch(labels)
            self._adapters -= 1
            if not self._adapters and self._registration is not None:
                self._registration.undo()
                self._registration = None

    def register(self, registry: EngineRegistry) -> None:
        """Register the collector with the engine's own registry. Idempotent.

        Raises:
            ValueError: The registry has another collector of these metrics.
        """
        with self._lock:
            collector = self._collector
            if registry is EngineRegistry.NONE or self._registration or collector is None:
                return
            self._registration = _register(collector, registry)

    def open(self, host: str, port: int) -> None:
        """Open an endpoint, or share the one that another adapter has opened.

        Raises:
            ConfigError: The port or the address cannot be used.
        """
        from hicache_storage.metrics import serve  # noqa: PLC0415 - the extra is optional

        with self._lock:
            assert self._collector is not None, "an adapter is watched first"
            server, users = self._servers.get((host, port), (None, 0))
            server = server or serve(self._collector, port=port, host=host)
            self._servers[host, port] = server, users + 1

    def release(self, host: str, port: int) -> None:
        """Close an endpoint that no adapter uses any more."""
        with self._lock:
            server, users = self._servers.pop((host, port))
            if users > 1:
                self._servers[host, port] = server, users - 1
                return
            server.close()


class _Registration(NamedTuple):
    publish: Callable[[], None]
    """A function that publishes the present figures."""
    undo: Callable[[], None]


def _register(collector: ViewCollector, registry: EngineRegistry) -> _Registration:
    from prometheus_client import REGISTRY  # noqa: PLC0415 - the extra is optional

    from hicache_storage.metrics.multiprocess import (  # noqa: PLC0415 - as above
        MultiprocessPublisher,
        is_multiprocess,
    )

    if registry is EngineRegistry.PROCESSES and is_multiprocess():
        publisher = MultiprocessPublisher(collector)
        return _Registration(publisher.publish, publisher.close)
    REGISTRY.register(collector)
    return _Registration(lambda: None, lambda: REGISTRY.unregister(collector))


_PROCESS: ForkLocal[_ProcessMetrics] = ForkLocal(_ProcessMetrics, close=lambda _: None)
"""A forked child starts without adapters, and with its parent's endpoints closed."""
