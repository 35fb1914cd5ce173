"""Tables for terminals. They use rich, which is imported when the first table is made."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table


_LONG = 12
"""How much of a longer word in a column that may wrap stays together, such as of a path."""


def text_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    columns: str = "l",
    *,
    best: int | None = None,
    tight: bool = False,
) -> Table:
    """Return a table with a title above each column. The row with the index `best` is bold.

    `columns` has a letter for each column, and its last letter also counts for all further columns.
    `l` aligns left and `r` aligns right. `L` and `R` align in the same way, but may wrap if the terminal
    is narrow. No number or id is cut: if they do not fit, the lines are longer than the terminal.
    """
    from rich import box  # noqa: PLC0415 - JSON alone does without it
    from rich.cells import cell_len  # noqa: PLC0415 - as above
    from rich.table import Table  # noqa: PLC0415

    padding = (0, 1, 0, 0) if tight else (0, 1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding)
    cells = [*rows]
    for index, (title, column) in enumerate(zip_longest(titles, columns, fillvalue=columns[-1])):
        texts = [title, *(row[index] for row in cells)]
        whole = (
            texts if column in "lr" else [word[:_LONG] for text in texts for word in text.split()]
        )
        table.add_column(
            title,
            justify="right" if column in "rR" else "left",
            no_wrap=column in "lr",
            overflow="fold",
            min_width=max(map(cell_len, whole), default=0),
        )
    for number, row in enumerate(cells):
        table.add_row(*row, style="bold" if number == best else None)
    return table


def fact_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table without titles. Each row has a name and a fact."""
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts:
        table.add_row(name, fact)
    return table
