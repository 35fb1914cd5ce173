"""Tables and lines on standard output: as wide as the terminal, or 80 columns in a file.

Every text that a verb prints goes through `print_lines` or `write_line`, which escape it.
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


def output_console() -> Console:
    """Return a console of standard output, which prints every text literally."""
    from rich import console  # noqa: PLC0415 - `--help` stays fast

    class EscapingConsole(console.Console):
        """A console to which a cell or a paragraph is text, and nothing in it a command."""

        def render_str(self, text: str, **options: Any) -> Text:
            """Return what rich makes of each text that it prints or measures. Line breaks stay."""
            return super().render_str("\n".join(map(escaped, text.split("\n"))), **options)

    output = EscapingConsole(highlight=False, markup=False, emoji=False)
    if not output.is_terminal:
        output.width = _FILE_WIDTH
    return output


def print_lines(console: Console, parts: Iterable[Table | str]) -> None:
    """Print tables and paragraphs without spaces at the ends of lines. The terminal wraps paragraphs."""
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_json(document: object) -> None:
    """Print a document."""
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def write_line(text: str) -> None:
    """Print one line at once, as long as it is."""
    sys.stdout.write(f"{escaped(text)}\n")
