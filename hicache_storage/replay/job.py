"""One process's replay from flags to figures: storages opened, requests played, everything closed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.replay.driver import Replay
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.config import StorageChoice
    from hicache_storage.controller import Ranks
    from hicache_storage.replay.disruptions import Trouble
    from hicache_storage.replay.driver import ReplaySettings, Stop
    from hicache_storage.replay.trace import Request
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class ReplayJob:
    """What the flags say. It can be sent to another process."""

    choice: StorageChoice
    settings: ReplaySettings
    troubles: Trouble
    requests: Sequence[Request]


def play(
    piece: ReplayJob,
    *,
    stop: Stop,
    progress: Callable[[int], None],
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Replay it; the figures, ready for JSON. `progress` is told the number of requests so far."""
    with ExitStack() as opened:
        storage, next_storage = piece.troubles.open(piece.choice, opened)
        replay = opened.enter_context(
            Replay(storage, piece.settings, next_storage=next_storage, ranks=ranks)
        )
        began_s = time.monotonic()
        replay.run(
            piece.requests,
            stop=stop,
            progress=lambda tally: progress(tally.requests),
            swap_after=piece.troubles.swap_after,
        )
        replay.finish()
        return {
            "elapsed_s": time.monotonic() - began_s,
            **_facts(replay),
            "notes": notes(piece, (storage, next_storage)),
            **replay.figures(),
            **piece.troubles.figures(replay),
        }


# Backends whose stores, under pressure, forget by a clock of seconds (redis.io: maxmemory_clock).
_SECONDS_CLOCK = ("redis",)
_TOO_FAST = (
    "Redis tells uses of a page apart by the second (allkeys-lru), and this run was as fast as possible:"
    " once Redis is full, it found less than it would at real speed. Try --speed 10"
)


def notes(piece: ReplayJob, storages: Sequence[HiCacheStorage | None]) -> list[str]:
    """Return what a reader must know before the figures are believed."""
    choices = (piece.choice, piece.troubles.swap)
    coarse = any(
        choice is not None
        and storage is not None
        and choice.backend in _SECONDS_CLOCK
        and storage.capabilities.retention is Retention.UNTIL_PRESSURE
        for choice, storage in zip(choices, storages, strict=True)
    )
    if not coarse or piece.settings.speed is not None:
        return []
    return [_TOO_FAST]


def _facts(replay: Replay) -> dict[str, Any]:
    """The settings that figures depend on."""
    settings = replay.settings
    return {
        "model": settings.model,
        "page_tokens": settings.page_tokens,
        "layout": settings.layout,
        "checksum": settings.checksum,
        "prefetch_policy": settings.controller.prefetch_policy.value,
        "write_policy": settings.controller.write_policy.value,
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
