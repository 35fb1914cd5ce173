"""Tables and lines on standard output: as wide as the terminal, or 80 columns in a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.segment import Segment

from hicache_storage.cli.stderr_log import escaped

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from rich.console import ConsoleOptions
    from rich.table import Table

_FILE_WIDTH = 80


def output_console() -> Console:
    """Return a console of standard output, which prints every text literally."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


class _Escaped:
    """A table or a paragraph whose texts, which other programs may have written, are no commands."""

    def __init__(self, part: Table | str) -> None:
        self._part = part

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Generator[Segment, None, None]:
        for segment in console.render(self._part, options):
            yield Segment(escaped(segment.text), segment.style, segment.control)


def print_lines(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and paragraphs without spaces at the ends of lines. The terminal wraps paragraphs."""
    with console.capture() as captured:
        for part in parts:
            console.print(_Escaped(part), soft_wrap=isinstance(part, str))
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())
