"""Show key spaces under the names of their models, which are never cut."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table

from hicache_storage.cli.escapes import escaped
from hicache_storage.cli.operations.selection import SHORT_ID_DIGITS, format_shard
from hicache_storage.cli.sizes import counted, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_storage.cli.operations.selection import SpaceUsage
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import UnreadableSpace

_GAP = 2
_POOL = 1
_FIGURES = 4
_FORMAT = 3
_WRAPPED = (_FORMAT, 2, 4, 5, _POOL)
"""The columns that wrap if the terminal is narrow, in this order: format, shard, the figures, pool."""
_LONG = {_FORMAT: 20, _POOL: 10}
"""In these columns a longer word may be cut. vLLM's layouts are words of 90 letters."""
_LEAST_WIDTH = 10


def space_parts(usages: Sequence[SpaceUsage], width: int) -> Iterator[Table | str]:
    """Yield each model with its revision and tenant, then a table of its key spaces."""
    lines = [[*_cells(usage), *_tier_cells(usage)] for usage in usages]
    if sum(_natural_widths(lines)) + _GAP * max(map(len, lines), default=0) > width:
        lines = [[*_cells(usage), "\n".join(_tier_cells(usage))] for usage in usages]
    rows = [(_heading(usage.space), cells) for usage, cells in zip(usages, lines, strict=True)]
    widths = _widths(lines, width)
    for heading, group in groupby(rows, key=lambda row: row[0]):
        yield heading
        table = Table(box=None, show_header=False, padding=(0, 0, 0, _GAP))
        for number, column in enumerate(widths):
            is_figure = number >= _FIGURES
            table.add_column(
                width=column, justify="right" if is_figure else "left", overflow="fold"
            )
        for _, cells in group:
            table.add_row(*cells)
        yield table


def unreadable_lines(spaces: Iterable[UnreadableSpace]) -> list[str]:
    """Return a line for each key space that the store cannot identify."""
    return [f"Key space {one.space_id} cannot be read: {one.reason}" for one in spaces]


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of the columns. Columns that wrap are cut between words, if that is enough."""
    columns = [*zip(*rows, strict=True)]
    widths = _natural_widths(rows)
    for number in _WRAPPED if columns else ():
        if sum(widths) + _GAP * len(widths) > width:
            words = (word for cell in columns[number] for word in cell.split())
            longest = max(map(cell_len, words), default=1)
            left = width - sum(widths) - _GAP * len(widths) + widths[number]
            least = _LEAST_WIDTH if longest > _LONG.get(number, longest) else longest
            widths[number] = min(longest, max(least, left))
    return widths


def _natural_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the longest line in each column."""
    columns = zip(*rows, strict=True)
    return [
        max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns
    ]


def _tier_cells(usage: SpaceUsage) -> list[str]:
    """Return the pages in each tier of a composed store. They share a column if they must."""
    return [f"{escaped(name)} {pages:,}" for name, (pages, _) in usage.tiers.items()]


def _heading(space: KeySpace) -> str:
    parts = [space.model]
    if space.revision:
        parts.append(f"revision {space.revision}")
    if space.tenant:
        parts.append(f"tenant {space.tenant}")
    return escaped(", ".join(parts))


def _cells(usage: SpaceUsage) -> list[str]:
    space = usage.space
    return [
        space.id[:SHORT_ID_DIGITS],
        escaped(space.pool),
        format_shard(space.shard),
        escaped(f"{space.dtype} {space.layout}"),
        "" if usage.pages is None else counted(usage.pages, "page"),
        "" if usage.nbytes is None else format_nbytes(usage.nbytes),
    ]
