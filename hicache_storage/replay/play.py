"""One process's replay from flags to figures: storages opened, requests played, everything closed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.replay.driver import Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.config import StorageChoice
    from hicache_storage.controller import Ranks
    from hicache_storage.replay.driver import ReplaySettings, Stop
    from hicache_storage.replay.trace import Request
    from hicache_storage.replay.trouble import Trouble


@dataclass(frozen=True, slots=True)
class Play:
    """What the flags say. It can be sent to another process."""

    choice: StorageChoice
    settings: ReplaySettings
    troubles: Trouble
    requests: Sequence[Request]


def play(
    piece: Play,
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
        return {
            "elapsed_s": time.monotonic() - began_s,
            **_facts(replay),
            **replay.figures(),
            **piece.troubles.figures(replay),
        }


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
                "space": pool.space.id,
            }
            for shape, pool in zip(settings.pools, replay.pools, strict=True)
        ],
        "ranks": None,
    }
