from __future__ import annotations

import pytest

from hicache_storage.controller import ControllerSettings, PrefetchPolicy


@pytest.mark.parametrize(
    ("policy", "max_wait_s"),
    [
        (PrefetchPolicy.BEST_EFFORT, 0.0),
        (PrefetchPolicy.WAIT_COMPLETE, None),
        (PrefetchPolicy.TIMEOUT, 1.0 + 32 * (64 / 1024 * 0.25)),
    ],
)
def test_max_wait(policy: PrefetchPolicy, max_wait_s: float | None) -> None:
    settings = ControllerSettings(prefetch_policy=policy)

    assert max_wait_s == settings.max_wait_s(pages=32, page_tokens=64)
