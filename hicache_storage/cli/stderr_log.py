"""Print a command's messages on stderr: errors, warnings and progress in words, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hicache_storage.cli.escapes import one_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

FORMATS = ("text", "json")


@dataclass(slots=True)
class StderrLog:
    """What a command prints on stderr, and how. Each message is one line."""

    program: str
    is_quiet: bool = False
    """True: print errors only, and no progress."""
    is_json: bool = False

    def print_error(self, message: str) -> None:
        """Print the reason why the command ends."""
        self._write("error", self.program, message, message)

    def print_info(self, message: str) -> None:
        """Print what the command has done, unless it is quiet."""
        if not self.is_quiet:
            self._write("info", self.program, message, message)

    def print_record(self, record: logging.LogRecord) -> None:
        """Print a record of a logger, without a traceback. A quiet command prints errors only."""
        if not self.is_quiet or record.levelno >= logging.ERROR:
            level, message = record.levelname.lower(), record.getMessage()
            self._write(level, record.name, message, f"{level}: {message}")

    def _write(self, level: str, logger: str, message: str, text: str) -> None:
        if self.is_json:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            fields = {"at": at, "level": level, "logger": logger, "message": one_line(message)}
            sys.stderr.write(f"{json.dumps(fields)}\n")
        else:
            sys.stderr.write(f"{self.program}: {one_line(text)}\n")


_current = StderrLog("hicache")


def stderr_log() -> StderrLog:
    """Return the log of the command that runs in this process."""
    return _current


@contextmanager
def log_of(program: str) -> Generator[StderrLog, None, None]:
    """Begin the log of a command, as text. `set_format` changes it once the flags are known."""
    global _current  # noqa: PLW0603 - a process runs one command at a time
    before, _current = _current, StderrLog(program)
    try:
        yield _current
    finally:
        _current = before


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all verbs about what is printed on stderr."""
    add = parser.add_argument_group("messages on stderr").add_argument
    add("--quiet", action="store_true", help="print errors only: no progress and no warnings")
    add(
        "--log-format",
        choices=FORMATS,
        default=FORMATS[0],
        help="how messages are printed; json: one object a line (default: %(default)s)",
    )


def set_format(arguments: argparse.Namespace) -> None:
    """Apply the flags of `add_log_arguments`, if the command has them."""
    _current.is_quiet = getattr(arguments, "quiet", False)
    _current.is_json = getattr(arguments, "log_format", "") == "json"


class StderrHandler(logging.Handler):
    """A log handler that prints each record on stderr as one line, without a traceback."""

    def __init__(self, log: StderrLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.print_record(record)
