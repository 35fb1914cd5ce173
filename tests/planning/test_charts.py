"""Plots: axes, lines, legends."""

from __future__ import annotations

import pytest

from hicache_storage.markup import text_of
from hicache_storage.planning.charts import Line, bandwidth_axis, line_chart, linear_axis, size_axis
from hicache_storage.planning.wording import percent, size


def test_a_linear_axis_has_round_ticks_up_to_the_largest_value() -> None:
    axis = linear_axis("y", 0.366, percent)

    assert [0, 0.1, 0.2, 0.3, 0.4] == pytest.approx(list(axis.ticks))
    assert 0.4 == pytest.approx(axis.high)


def test_an_axis_without_a_value_still_has_a_length() -> None:
    assert 0 < linear_axis("y", 0.0, percent).high


def test_an_axis_of_bandwidths_has_round_ticks_in_the_unit_of_the_highest() -> None:
    axis = bandwidth_axis(1.9 * (1 << 30))

    assert ["0 B/s", "512 MiB/s", "1 GiB/s", "1.50 GiB/s", "2 GiB/s"] == [
        axis.text(tick) for tick in axis.ticks
    ]


def test_an_axis_of_sizes_has_ticks_at_powers_of_two() -> None:
    axis = size_axis("x", 3 << 30, 1 << 42, size)

    assert ["4 GiB", "16 GiB", "64 GiB", "256 GiB", "1 TiB", "4 TiB"] == [
        axis.text(tick) for tick in axis.ticks
    ]
    assert 0.0 == axis.place(3 << 30)
    assert 1.0 == axis.place(1 << 42)


def test_each_line_has_a_path_and_a_name() -> None:
    lines = [Line("one <b>", [(1.0, 0.0), (4.0, 1.0)]), Line("two", [(1.0, 0.5)])]

    chart = text_of(
        [line_chart("both", lines, size_axis("x", 1, 4, size), linear_axis("y", 1, percent))]
    )

    assert 2 == chart.count("<path ")
    assert 'd="M64.0,276.0 L704.0,12.0"' in chart
    assert "one &lt;b&gt;" in chart
    assert "<title>both</title>" in chart
