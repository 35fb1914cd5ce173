"""Latencies in buckets."""

from __future__ import annotations

import pytest

from hicache_storage.cli.operations.bench.latencies import Latencies


def _of(*milliseconds: float) -> Latencies:
    latencies = Latencies()
    for each in milliseconds:
        latencies.add(each / 1000)
    return latencies


@pytest.mark.parametrize(("share", "expected_s"), [(0.5, 0.5), (0.99, 0.99), (0.999, 0.999)])
def test_percentiles_are_right_within_a_percent(share: float, expected_s: float) -> None:
    latencies = _of(*range(1, 1001))

    assert latencies.quantile(share) == pytest.approx(expected_s, rel=0.006)


def test_no_call_has_no_percentile() -> None:
    assert _of().quantile(0.5) is None
    assert _of().curve() == []


def test_merged_latencies_are_those_of_both() -> None:
    latencies = _of(*[1] * 99)
    latencies.merge(_of(100))

    assert latencies.count == 100
    assert latencies.quantile(0.99) == pytest.approx(0.001, rel=0.006)
    assert latencies.quantile(1) == pytest.approx(0.1, rel=0.006)


def test_a_curve_ends_where_the_calls_do() -> None:
    assert _of(*range(1, 101)).curve()[-1][0] <= 100
    assert _of(*range(1, 2001)).curve()[-1][0] == pytest.approx(1000)
