"""Log records as lines on stderr, and texts that a terminal does not obey."""

from __future__ import annotations

import logging
import sys


class StderrHandler(logging.Handler):
    """Prints each record on stderr as one line of the program, without a traceback."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def emit(self, record: logging.LogRecord) -> None:
        text = one_line(record.getMessage())
        sys.stderr.write(f"{self._program}: {record.levelname.lower()}: {text}\n")


def one_line(text: str) -> str:
    """Return a text as one line, which no terminal takes for a command."""
    return escaped(" ".join(text.split()))


def escaped(text: str) -> str:
    """Return a text with each control and format character escaped, but for line feeds."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )
