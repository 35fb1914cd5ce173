"""Draw plots as inline SVG: lines over an axis of sizes or of time. The page's style sets the colors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.markup import element
from hicache_storage.scalars import format_nbytes, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from xml.etree.ElementTree import Element

    from hicache_storage.markup import Child

_WIDTH, _HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A named line of a plot."""

    name: str
    points: Sequence[Sequence[float]]
    """(x, y) points in order of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis, with the values and texts of its ticks."""

    title: str
    ticks: Sequence[float]
    text: Callable[[float], str]
    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies: 0 at the start of the axis, 1 at its end."""
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log2(max(value, low)), math.log2(low), math.log2(high)
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0


def size_axis(title: str, low: float, high: float, text: Callable[[float], str]) -> Axis:
    """Return a logarithmic axis of bytes with ticks at powers of two."""
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / 8))
    ticks = [2.0**power for power in range(first, last + 1, step)]
    return Axis(title=title, ticks=ticks, text=text, low=low, high=high, logarithmic=True)


def linear_axis(title: str, high: float, text: Callable[[float], str]) -> Axis:
    """Return an axis from 0 to at least `high` with ticks at round values."""
    rough = max(high, 1e-9) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    count = max(1, math.ceil(high / step))
    ticks = [step * number for number in range(count + 1)]
    return Axis(title=title, ticks=ticks, text=text, low=0.0, high=ticks[-1])


def bandwidth_axis(high: float) -> Axis:
    """Return an axis of bytes per second, with ticks at round values of the unit that it shows."""
    unit_nbytes, _ = unit_of(high)
    axis = linear_axis("bandwidth", high / unit_nbytes, str)
    return Axis(
        title=axis.title,
        ticks=[tick * unit_nbytes for tick in axis.ticks],
        text=lambda bytes_per_s: f"{format_nbytes(bytes_per_s)}/s",
        low=0.0,
        high=axis.high * unit_nbytes,
    )


def line_chart(title: str, lines: Sequence[Line], x: Axis, y: Axis) -> Element:
    """Return a plot with its legend. A screen reader reads out `title`."""
    plot = element(
        "svg",
        element("title", title),
        *_grid(x, y),
        *(_path(number, line, x, y) for number, line in enumerate(lines)),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        class_="chart",
    )
    legend: list[Child] = [
        element("li", element("span", class_=f"key line-{number % _COLOURS}"), line.name)
        for number, line in enumerate(lines)
    ]
    return element("figure", plot, element("ul", *legend, class_="legend"))


def _grid(x: Axis, y: Axis) -> list[Element]:
    """Return the grid, the texts of the ticks and the titles of the axes."""
    made: list[Element] = []
    for tick in y.ticks:
        at = _down(y.place(tick))
        made += [
            element("line", x1=f"{_LEFT}", x2=f"{_WIDTH - _RIGHT}", y1=at, y2=at, class_="grid"),
            element("text", y.text(tick), x=f"{_LEFT - 8}", y=at, class_="tick y"),
        ]
    for tick in x.ticks:
        at = _across(x.place(tick))
        made += [
            element("line", x1=at, x2=at, y1=f"{_TOP}", y2=f"{_HEIGHT - _BOTTOM}", class_="grid"),
            element("text", x.text(tick), x=at, y=f"{_HEIGHT - _BOTTOM + 18}", class_="tick x"),
        ]
    middle = f"{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}"
    made.append(element("text", x.title, x=middle, y=f"{_HEIGHT - 6}", class_="tick x"))
    return made


def _path(number: int, line: Line, x: Axis, y: Axis) -> Element:
    places = (f"{_across(x.place(point[0]))},{_down(y.place(point[1]))}" for point in line.points)
    return element("path", d=f"M{' L'.join(places)}", class_=f"line line-{number % _COLOURS}")


def _across(place: float) -> str:
    return f"{_LEFT + place * (_WIDTH - _LEFT - _RIGHT):.1f}"


def _down(place: float) -> str:
    return f"{_HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM):.1f}"
