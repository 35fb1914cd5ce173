"""Tables and lines on standard output: as wide as the terminal, or 80 columns in a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

_FILE_WIDTH = 80


def output_console() -> Console:
    """Return a console of standard output, which prints every text literally."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def print_lines(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and paragraphs without spaces at the ends of lines. The terminal wraps paragraphs."""
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
