"""Run one process's replay: open the storages, run the requests, close all, return the figures."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.composition.parts import undivided, undivided_configs
from hicache_storage.replay.driver import Replay
from hicache_storage.replay.endpoint import serve_metrics
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.config import StorageChoice
    from hicache_storage.controller import Ranks
    from hicache_storage.replay.disruptions import Disruptions
    from hicache_storage.replay.driver import ReplaySettings, StopSignal
    from hicache_storage.replay.report import RequestCounts
    from hicache_storage.replay.trace import Request
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """Everything that the flags of a replay describe. It can be pickled."""

    choice: StorageChoice
    settings: ReplaySettings
    disruptions: Disruptions
    requests: Sequence[Request]
    metrics_port: int | None = None
    """The port for rank 0's metrics. Rank n adds n to it. None: no metrics are served."""
    keep: bool = False
    """True if the pages stay in the storage at the end."""


def run_job(
    job: ReplayJob,
    *,
    stop: StopSignal,
    progress: Callable[[int], None],
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Run the replay and return its figures, ready for JSON.

    `progress` is called with the number of requests so far.
    """
    with ExitStack() as opened:
        storage, next_storage = job.disruptions.open(job.choice, opened)
        replay = opened.enter_context(
            Replay(
                storage,
                job.settings,
                next_storage=next_storage,
                ranks=ranks,
                undoes=not job.keep,
            )
        )
        if job.metrics_port is not None:
            choices = filter(None, (job.choice, job.disruptions.swap))
            backends = [choice.backend for choice in choices]
            opened.enter_context(serve_metrics(replay, backends, job.metrics_port))
        began_s = time.monotonic()
        replay.run(
            job.requests,
            stop=stop,
            progress=lambda counts: progress(counts.requests),
            swap_after=job.disruptions.swap_after,
        )
        replay.finish()
        report = {
            "elapsed_s": time.monotonic() - began_s,
            **_settings(replay),
            "notes": notes(job, (storage, next_storage), replay.counts),
            **replay.figures(),
            **job.disruptions.figures(replay),
        }
        left_pages = None if job.keep else replay.remove_pages()
        return {**report, "left_pages": left_pages}


# These backends evict by a clock that counts seconds (redis.io: maxmemory_clock).
_SECONDS_CLOCK = ("redis",)
_TOO_FAST = (
    "Redis records the use of a page by the second (allkeys-lru), but this run was as fast as"
    " possible, so a full Redis found fewer pages than at real speed. Try --speed 10"
)
_WARM = (
    "more blocks were found than an infinite cache of this trace alone would have: the storage had them"
    " from another run. Clear it to measure a cold start (hicache gc)"
)


def notes(
    job: ReplayJob, storages: Sequence[HiCacheStorage | None], counts: RequestCounts
) -> list[str]:
    """Return notes on how to read the figures, for example that the storage was not empty."""
    warm = counts.blocks.l2 + counts.blocks.l3 > counts.ideal_block_hits
    too_fast = job.settings.speed is None and _evicts_by_second(job, storages)
    return [*[_WARM] * warm, *[_TOO_FAST] * too_fast]


def _evicts_by_second(job: ReplayJob, storages: Sequence[HiCacheStorage | None]) -> bool:
    choices = (job.choice, job.disruptions.swap)
    return any(
        backend in _SECONDS_CLOCK
        and undivided(storage)[name].capabilities.retention is Retention.UNTIL_PRESSURE
        for choice, storage in zip(choices, storages, strict=True)
        if choice is not None and storage is not None
        for name, (backend, _) in undivided_configs(choice.backend, choice.config).items()
    )


def _settings(replay: Replay) -> dict[str, Any]:
    """Return the settings that the figures depend on."""
    settings = replay.settings
    return {
        "model": settings.model,
        "page_tokens": settings.page_tokens,
        "layout": settings.layout,
        "checksum": settings.checksum,
        "prefetch_policy": settings.controller.prefetch_policy.value,
        "write_policy": settings.controller.write_policy.value,
        "admission": settings.admission.model_dump(),
        "host_pages": settings.slots,
        "pools": [
            {
                "name": shape.name,
                "shape": str(shape.shape),
                "page_nbytes": pool.space.page_nbytes,
                "space": spaces[0],
                "spaces": spaces,
            }
            for shape, pool, spaces in zip(
                settings.pools, replay.pools, replay.stored_spaces, strict=True
            )
        ],
        "ranks": None,
    }
