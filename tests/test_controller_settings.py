from __future__ import annotations

from typing import Any

import pytest

from hicache_storage.controller import ControllerSettings, PrefetchPolicy, WritePolicy


def test_the_defaults_are_sglangs() -> None:
    settings = ControllerSettings()

    assert settings.prefetch_policy is PrefetchPolicy.TIMEOUT
    assert settings.write_policy is WritePolicy.WRITE_THROUGH
    assert settings.prefetch_threshold_tokens == 256
    assert settings.prefetch_capacity == 0.5


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_pages", 0),
        ("prefetch_threads", 0),
        ("write_queue_pages", 0),
        ("inflight_nbytes", 0),
        ("explained_requests", 0),
        ("prefetch_capacity", 0.0),
        ("prefetch_capacity", 1.1),
        ("prefetch_threshold_tokens", -1),
        ("prefetch_timeout_base_s", -0.1),
    ],
)
def test_wrong_settings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ControllerSettings(**{field: value})
