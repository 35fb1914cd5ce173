"""Figures show the numbers of the tables below them."""

from __future__ import annotations

import re

import pytest
from figures import FigureError, figures_of, markup, with_figures
from servers import ROOT

TABLE = """
| | small, cold | large |
|---|---|---|
| `file`, get | 0.50 (0.90) | 4.00 |
| `redis` | | **0.25** |
"""
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "docs").rglob("*.md")
    if "<!-- figure" in path.read_text(encoding="utf-8")
}


def page(options: str = "") -> str:
    return f'<!-- figure {{"title": "Gets", "one": "1: equal"{options}}} -->\n{TABLE}'


def places(html: str) -> list[tuple[float, float]]:
    """Return the left edge and the width of each bar, in percent."""
    found = re.findall(r'style="left: ([\d.]+)%; width: ([\d.]+)%"', html)
    return [(float(left), float(width)) for left, width in found]


def test_a_figure_has_the_numbers_of_the_table_as_they_are_written() -> None:
    (figure,) = figures_of(page())

    assert ["`file`, get", "`redis`"] == figure.groups
    assert ["small, cold", "large"] == figure.bars
    assert [["0.50", "4.00"], ["", "0.25"]] == figure.numbers


def test_columns_and_the_number_of_a_cell_are_chosen() -> None:
    (figure,) = figures_of(page(', "columns": ["small, cold"], "number": -1'))

    assert [["0.90"], [""]] == figure.numbers
    assert "redis" not in markup(figure)


def test_ratios_are_drawn_from_one_to_both_sides() -> None:
    """The scale goes from 0.25 to 4, so 1 is in the middle, and a factor of 2 is a quarter of it."""
    assert [(25, 25), (50, 50), (0, 50)] == places(with_figures(page()))


def test_shares_are_drawn_from_zero() -> None:
    drawn = places(with_figures(page(', "scale": "share"')))

    assert [(0, 12.5), (0, 100), (0, 6.25)] == drawn


def test_the_table_stays() -> None:
    assert with_figures(page()).endswith(TABLE)


@pytest.mark.parametrize("options", [', "columns": ["huge"]', ', "number": 2'])
def test_a_figure_that_the_table_cannot_give_is_an_error(options: str) -> None:
    with pytest.raises(FigureError, match=r"huge|has no number 2"):
        with_figures(page(options))


def test_a_marker_without_a_table_is_an_error() -> None:
    with pytest.raises(FigureError, match="no table"):
        with_figures(page().replace("|", ""))


def test_words_are_escaped() -> None:
    (figure,) = figures_of(page().replace("redis", "<b>"))

    assert "<code>&lt;b&gt;</code>" in markup(figure)


def test_the_pages_of_measurements_have_figures() -> None:
    assert {"scale.md", "serving.md", "sglang.md", "speed.md"} == set(PAGES)


@pytest.mark.parametrize("text", PAGES.values(), ids=PAGES)
def test_every_figure_can_be_drawn(text: str) -> None:
    for figure in figures_of(text):
        assert any(map(any, figure.numbers)), figure.title
        assert all(0 <= left and left + width < 100.02 for left, width in places(markup(figure)))
