"""Print log records as lines on stderr."""

from __future__ import annotations

import logging
import sys

from hicache_storage.cli.escapes import one_line


class StderrHandler(logging.Handler):
    """A log handler that prints each record on stderr as one line, without a traceback."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def emit(self, record: logging.LogRecord) -> None:
        text = one_line(record.getMessage())
        sys.stderr.write(f"{self._program}: {record.levelname.lower()}: {text}\n")
