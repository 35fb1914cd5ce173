"""Serve the metrics of a replay over HTTP while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.metrics import CacheView, MetricsServer
    from hicache_storage.replay.driver import Replay


def serve_metrics(replay: Replay, backends: Sequence[str], port: int) -> MetricsServer:
    """Serve the metrics of this rank, at `port` plus the rank's number.

    `backends` names the first storage, and the one that replaces it. The controller's counters appear
    with the first.

    Raises:
        ConfigError: The extra is missing, or the port cannot be used.
    """
    try:
        from hicache_storage.metrics import ViewCollector, serve  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            f'--metrics-port needs the extra "metrics": {install_command("metrics")}'
        ) from error
    rank = replay.settings.rank
    collector = ViewCollector(["backend", "engine", "rank"])
    common = {"engine": "replay", "rank": str(rank)}
    for number, (name, view) in enumerate(zip(backends, _views(replay), strict=False)):
        label = f"{name}-2" if name in backends[:number] else name
        collector.watch(view, {**common, "backend": label})
    try:
        return serve(collector, port=port + rank)
    except ConfigError as error:
        raise ConfigError(f"--metrics-port: {error}") from error


def _views(replay: Replay) -> list[Callable[[], CacheView]]:
    """Return the data for a scrape of each storage: the first, and the one that replaces it."""
    from hicache_storage.metrics import CacheView  # noqa: PLC0415 - an extra

    def swapped() -> bool:
        return replay.swap is not None and replay.swap.attached

    def first() -> CacheView:
        return CacheView(
            store=replay.stores[0], controller=replay.controller, attached=not swapped()
        )

    def second() -> CacheView:
        return CacheView(store=replay.stores[1], attached=swapped())

    return [first, second]
