"""Print tables and lines on standard output, as wide as the terminal, or with 80 columns to a file.

Every text of a verb is printed by `print_lines` or `write_line`, which escape it.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.escapes import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_FILE_WIDTH = 80
_BETWEEN = 3
"""Blanks between two columns of a table."""


def output_console() -> Console:
    """Return a console for standard output that prints every text literally."""
    from rich import console  # noqa: PLC0415 - `--help` stays fast

    class EscapingConsole(console.Console):
        """A console that escapes the text of cells and paragraphs."""

        def render_str(self, text: str, **options: Any) -> Text:
            """Convert a text that rich prints or measures. Line breaks stay."""
            return super().render_str("\n".join(map(escaped, text.split("\n"))), **options)

    output = EscapingConsole(highlight=False, markup=False, emoji=False)
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    return output


def print_lines(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and paragraphs, without spaces at line ends. The terminal wraps long lines."""
    width = console.width
    with console.capture() as captured:
        for part in parts:
            if not isinstance(part, str):
                least = sum((column.min_width or 0) + _BETWEEN for column in part.columns)
                console.width = max(width, least)  # or rich drops columns
            console.print(part, soft_wrap=isinstance(part, str))
    console.width = width
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_json(document: object) -> None:
    """Print a document."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def write_line(text: str) -> None:
    """Print one line at once, however long it is."""
    sys.stdout.write(f"{escaped(text)}\n")
