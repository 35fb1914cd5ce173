from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_storage.controller import ControllerSettings
from hicache_storage.durations import MAX_DURATION_S, check_seconds, parse_seconds
from hicache_storage.errors import ConfigError
from hicache_storage.handoff import HandoffSettings
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.settings import PositiveSeconds, Settings


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


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (30, 30),
        (2.5, 2.5),
        ("30", 30),
        ("2.5", 2.5),
        ("500ms", 0.5),
        ("90s", 90),
        ("1.5 h", 5400),
        ("1d", 86_400),
        ("2W", 1_209_600),
    ],
)
def test_a_time_is_a_number_or_has_a_unit(value: object, seconds: float) -> None:
    assert seconds == parse_seconds(value)


@pytest.mark.parametrize(
    "value",
    ["", "d", "-1d", "1y", "1d2h", "1_0s", "1 s x", "1e3s", "1\u017f", "5m\u017f", True, None],
)
def test_anything_else_is_no_time(value: object) -> None:
    with pytest.raises(ValueError, match="a time with a unit"):
        parse_seconds(value)


def test_the_limits_of_a_setting_hold_for_a_time_with_a_unit() -> None:
    assert 60 == _Backend.parse("test", {"timeout_s": "1m"}).timeout_s
    with pytest.raises(ConfigError, match=r"timeout_s.*less than or equal to 1000000"):
        _backend(timeout_s="2w")
