"""Ages are typed with one unit, and shown with their two largest units."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from hicache_storage.cli.ages import age, format_time
from hicache_storage.durations import format_age, format_skew


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1.5h", 5400),
        ("1d", 86_400),
        ("2w", 1_209_600),
        ("1 D", 86_400),
    ],
)
def test_an_age_has_a_unit(text: str, seconds: float) -> None:
    assert seconds == age(text)


@pytest.mark.parametrize("text", ["", "1", "d", "-1d", "1y", "1d2h", "0d", "1_0d", "nan", "1e3s"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a time like"):
        age(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (40, "40s"), (725, "12m 5s"), (3600, "1h"), (273_600, "3d 4h"), (-5, "0s")],
)
def test_an_age_is_shown_in_two_units(seconds: float, text: str) -> None:
    assert text == format_age(seconds)


def test_a_time_is_shown_in_utc() -> None:
    assert format_time(0) == "1970-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("at_s", "text"), [(-9.0, "1970-01-01T00:00:00Z"), (1e18, "9999-12-31T23:59:59Z")]
)
def test_a_time_that_no_calendar_has_is_cut(at_s: float, text: str) -> None:
    assert text == format_time(at_s)


@pytest.mark.parametrize(
    ("skew_s", "text"), [(-0.01, "+0.0 s"), (12.34, "+12.3 s"), (-259_200, "-3d")]
)
def test_a_skew_has_a_readable_unit(skew_s: float, text: str) -> None:
    assert text == format_skew(skew_s)
