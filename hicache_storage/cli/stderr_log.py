"""Log records as lines on stderr."""

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
    """Return a text as one line, with each character escaped that a terminal would obey."""
    words = " ".join(text.split())
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in words)
