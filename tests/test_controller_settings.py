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
