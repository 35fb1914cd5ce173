"""The plot of speed in the README, drawn as SVG from the table above it.

    python docs/site/speed_plot.py      # writes docs/images/speed-light.svg and speed-dark.svg

Run it after you have changed the table. A test compares the files with what this would write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from figures import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (`\w+`) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
_FONT = 'system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif'
_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
_NAMED = 'role="img" aria-labelledby="title"'
_WIDTH, _LEFT, _RIGHT = 860, 300, 810
_TOP, _STEP, _BAR = 64, 34, 12
_TICKS = ("0.5", "1", "2", "4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """The colors of one picture."""

    ground: str
    text: str
    quiet: str
    line: str
    bars: tuple[str, str]


THEMES = {
    "light": Theme(
        ground="#ffffff",
        text="#1f2328",
        quiet="#59636e",
        line="#d1d9e0",
        bars=("#0969da", "#bc4c00"),
    ),
    "dark": Theme(
        ground="#0d1117",
        text="#f0f6fc",
        quiet="#9198a1",
        line="#3d444d",
        bars=("#4493f8", "#db6d28"),
    ),
}


def path_of(theme: str) -> Path:
    """Return the file of a theme's picture."""
    return ROOT / "docs" / "images" / f"speed-{theme}.svg"


def rows_of(readme: str) -> list[tuple[str, ...]]:
    """Return the rows of the README's table: ours, theirs, writes and reads."""
    return [match.groups() for match in _ROW.finditer(readme)]


def svg(readme: str, theme: Theme) -> str:
    """Return the picture of the README's table."""
    rows = rows_of(readme)
    figure = Figure(
        title="Bytes a second, ours / theirs",
        one="1: as fast",
        logarithmic=True,
        groups=[f"{ours} / {theirs}".replace("`", "") for ours, theirs, *_ in rows],
        bars=["writes", "reads"],
        numbers=[row[2:] for row in rows],
    )
    height = _TOP + _STEP * len(rows) + 12
    sides = f'width="{_WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg {_NAMESPACE} viewBox="0 0 {_WIDTH} {height}" {sides} {_NAMED}>',
            f'<title id="title">{escape(figure.title)}</title>',
            f"<style>text{{font:13px {_FONT};fill:{theme.text}}}.q{{fill:{theme.quiet}}}</style>",
            f'<rect {sides} fill="{theme.ground}"/>',
            f'<text x="24" y="26" style="font-weight:600">{escape(figure.title)}</text>',
            *_legend(figure, theme),
            *_ticks(figure, theme, height),
            *_groups(figure, theme),
            "</svg>\n",
        ]
    )


def _x(figure: Figure, value: str) -> float:
    return _LEFT + (_RIGHT - _LEFT) * figure.scale().place(float(value)) / 100


def _legend(figure: Figure, theme: Theme) -> Iterator[str]:
    for at, (name, color) in enumerate(zip(figure.bars, theme.bars, strict=True)):
        x = _LEFT + 90 * at
        yield f'<rect x="{x}" y="16" width="12" height="12" rx="2" fill="{color}"/>'
        yield f'<text x="{x + 18}" y="26">{name}</text>'


def _ticks(figure: Figure, theme: Theme, height: int) -> Iterator[str]:
    for tick in _TICKS:
        x, width = f"{_x(figure, tick):.1f}", 2 if tick == "1" else 1
        color = theme.quiet if tick == "1" else theme.line
        yield (
            f'<line x1="{x}" y1="{_TOP - 8}" x2="{x}" y2="{height - 8}" stroke="{color}"'
            f' stroke-width="{width}"/>'
        )
        yield f'<text x="{x}" y="{_TOP - 14}" class="q" text-anchor="middle">{tick}</text>'


def _groups(figure: Figure, theme: Theme) -> Iterator[str]:
    one = _x(figure, "1")
    for row, (name, numbers) in enumerate(zip(figure.groups, figure.numbers, strict=True)):
        top = _TOP + _STEP * row
        yield f'<text x="{_LEFT - 44}" y="{top + 18}" text-anchor="end">{escape(name)}</text>'
        for at, (number, color) in enumerate(zip(numbers, theme.bars, strict=True)):
            end, y = _x(figure, number), top + 1 + at * (_BAR + 1)
            left, width = min(one, end), abs(end - one)
            yield (
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"'
                f' fill="{color}"/>'
            )
            side = f'x="{end + 5:.1f}"' if end >= one else f'x="{end - 5:.1f}" text-anchor="end"'
            yield f'<text {side} y="{y + 10}" class="q" style="font-size:11px">{number}</text>'


def main() -> None:
    """Write both pictures."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, theme in THEMES.items():
        path_of(name).write_text(svg(readme, theme), encoding="utf-8")


if __name__ == "__main__":
    main()
