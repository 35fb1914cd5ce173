"""The README's table of speed has recorded figures, and its pictures show them."""

from __future__ import annotations

import re

import pytest
from servers import ROOT
from speed_plot import THEMES, path_of, rows_of, svg

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = [
    line
    for page in ("speed.md", "sglang.md")
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
]


def test_the_table_is_found() -> None:
    assert len(rows_of(README)) == 9


@pytest.mark.parametrize("row", rows_of(README), ids=" / ".join)
def test_a_figure_is_one_of_the_record(row: tuple[str, ...]) -> None:
    """Each figure is in a row of a page of measurements that names both stores and has both figures."""
    ours, theirs, writes, reads = row
    names = {ours, f"`{theirs.split('`')[1]}`"}

    assert any(
        all(name in line for name in names)
        and {writes, reads} <= set(line.replace("*", "").replace(",", "").split())
        for line in RECORDS
    )


@pytest.mark.parametrize("theme", THEMES)
def test_a_picture_is_that_of_the_table(theme: str) -> None:
    """Run `python docs/site/speed_plot.py` after each change of the table."""
    assert svg(README, THEMES[theme]) == path_of(theme).read_text(encoding="utf-8")


def test_another_figure_is_another_picture() -> None:
    changed = re.sub(r"\| [\d.]+ \|$", "| 9.99 |", README, count=1, flags=re.MULTILINE)

    assert svg(changed, THEMES["light"]) != svg(README, THEMES["light"])
