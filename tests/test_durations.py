from __future__ import annotations

import math
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hicache_storage.controller import ControllerSettings
from hicache_storage.durations import MAX_DURATION_S, check_seconds
from hicache_storage.handoff import HandoffSettings
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.settings import PositiveSeconds, Settings

if TYPE_CHECKING:
    from collections.abc import Callable


class _Backend(Settings):
    timeout_s: PositiveSeconds


def _backend(**config: Any) -> Settings:
    return _Backend.parse("test", config)


SETTINGS: list[tuple[Callable[..., object], str]] = [
    (PageStoreSettings, "timeout_s"),
    (PageStoreSettings, "breaker_cooldown_s"),
    (ControllerSettings, "prefetch_timeout_base_s"),
    (ControllerSettings, "prefetch_timeout_per_ki_token_s"),
    (HandoffSettings, "timeout_s"),
    (HandoffSettings, "stale_after_s"),
    (_backend, "timeout_s"),
]


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e300, -1.0])
@pytest.mark.parametrize(("settings", "name"), SETTINGS)
def test_a_time_that_nothing_can_wait_for_is_refused_by_name(
    settings: Callable[..., object], name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.*not {re.escape(str(value))}"):
        settings(**{name: value})


def test_the_longest_time_can_be_waited_for() -> None:
    done = threading.Event()
    done.set()

    assert done.wait(MAX_DURATION_S)


def test_zero_is_a_time_where_it_means_not_at_all() -> None:
    check_seconds("patience_s", 0, zero=True)
    with pytest.raises(ValueError, match="patience_s must be greater than 0"):
        check_seconds("patience_s", 0)


@pytest.mark.parametrize("value", [True, False, "2", None, [2]])
def test_a_flag_or_a_text_is_no_time(value: Any) -> None:
    with pytest.raises(TypeError, match="patience_s must be a number of seconds, not"):
        check_seconds("patience_s", value, zero=True)


def test_numpys_times_are_times() -> None:
    check_seconds("patience_s", np.float32(2))
    check_seconds("patience_s", np.int64(2))


def test_a_time_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="not a number of 16610 bits"):
        check_seconds("patience_s", 10**5000)
