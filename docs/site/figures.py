"""Figures of the site, drawn from the table below each marker of a page.

    <!-- figure {"title": "Sets", "one": "1: as fast as the peer", "columns": ["64 KiB", "1 MiB"]} -->

A row of the table is a group of bars, with a bar for each of `columns` (default: all but the first).
`number` is the place of the number in a cell: 0 (the default) or more, or -1 for the last. On the scale
`ratio` (the default) a bar starts at 1, and the scale is logarithmic. On the scale `share` it starts at
0.
"""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MARKER = re.compile(r"^<!-- figure (\{.*\}) -->\n", re.MULTILINE)
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_CODE = re.compile(r"`([^`]*)`")


class FigureError(ValueError):
    """A figure that the table below its marker cannot give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scale of a figure from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool

    def place(self, value: float) -> float:
        """Return the place of a value in per cent of the width."""
        if self.logarithmic:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure: the names of its groups and bars, and the number of each bar as the table has it."""

    title: str
    one: str
    """The meaning of 1, at which there is a line."""
    logarithmic: bool
    groups: Sequence[str]
    bars: Sequence[str]
    numbers: Sequence[Sequence[str]]
    """A row for each group. A bar that is not there is an empty text."""

    def scale(self) -> Scale:
        """Return the scale on which all bars and the line at 1 have a place."""
        values = [float(number) for row in self.numbers for number in row if number]
        if not self.logarithmic:
            return Scale(low=0.0, high=max(1.05, *values), logarithmic=False)
        return Scale(low=min(0.5, *values), high=max(1.25, *values), logarithmic=True)


def with_figures(text: str) -> str:
    """Return the Markdown of a page with a figure in the place of each marker."""
    return _MARKER.sub(lambda marker: f"{markup(_figure(text, marker))}\n\n", text)


def figures_of(text: str) -> list[Figure]:
    """Return the figures of a page."""
    return [_figure(text, marker) for marker in _MARKER.finditer(text)]


def markup(figure: Figure) -> str:
    """Return the HTML of a figure: one block without an empty line, as Markdown needs it."""
    scale = figure.scale()
    legend = (f'<li class="bars-{at}">{_words(name)}</li>' for at, name in enumerate(figure.bars))
    return "\n".join(
        [
            f'<figure class="bars" style="--one: {scale.place(1.0):.2f}%">',
            f"<figcaption>{_words(figure.title)}</figcaption>",
            f'<ul class="bars-legend">{"".join(legend)}',
            f'<li class="bars-one">{_words(figure.one)}</li></ul>',
            *(
                _group(name, row, scale)
                for name, row in zip(figure.groups, figure.numbers, strict=True)
                if any(row)
            ),
            "</figure>",
        ]
    )


def _figure(text: str, marker: re.Match[str]) -> Figure:
    wanted: dict[str, Any] = json.loads(marker[1])
    table = _TABLE.search(text, marker.end())
    if table is None:
        raise FigureError(f"no table below {marker[0]!r}")
    heads, _, *rows = [_cells(line) for line in table[0].splitlines()]
    bars: list[str] = wanted.get("columns", heads[1:])
    unknown = [name for name in bars if name not in heads]
    if unknown:
        raise FigureError(f"no column {unknown[0]!r} in the table below {marker[0]!r}")
    at: int = wanted.get("number", 0)
    return Figure(
        title=wanted["title"],
        one=wanted["one"],
        logarithmic={"ratio": True, "share": False}[wanted.get("scale", "ratio")],
        groups=[row[0] for row in rows],
        bars=bars,
        numbers=[[_number(row[heads.index(name)], at) for name in bars] for row in rows],
    )


def _group(name: str, row: Sequence[str], scale: Scale) -> str:
    bars = "".join(_bars(row, scale))
    return f'<div class="bars-group"><div class="bars-name">{_words(name)}</div><div>{bars}</div></div>'


def _bars(row: Sequence[str], scale: Scale) -> Iterator[str]:
    start = scale.place(1.0) if scale.logarithmic else 0.0
    for at, number in enumerate(row):
        if number:
            end = scale.place(float(number))
            style = f"left: {min(start, end):.2f}%; width: {abs(end - start):.2f}%"
            yield (
                '<div class="bars-row"><div class="bars-plot">'
                f'<div class="bars-bar bars-{at}" style="{style}"></div></div>'
                f'<div class="bars-number">{number}</div></div>'
            )


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str, at: int) -> str:
    found = _NUMBER.findall(cell)
    if not found:
        return ""
    if not -len(found) <= at < len(found):
        raise FigureError(f"{cell!r} has no number {at}")
    return str(found[at])


def _words(text: str) -> str:
    return _CODE.sub(r"<code>\1</code>", html.escape(text, quote=False))
