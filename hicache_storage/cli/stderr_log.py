"""Log records as lines on stderr."""

from __future__ import annotations

import logging
import sys


class StderrHandler(logging.Handler):
    """Prints each record on stderr as one line, without a traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        sys.stderr.write(f"hicache: {record.levelname.lower()}: {text}\n")
