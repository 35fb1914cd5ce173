"""Show the warnings of a run: every change of state, but no repeated warning."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

_REPEAT_INTERVAL_S = 30.0
_ALTERNATING_INTERVAL_S = 1.0


class RepeatFilter(logging.Filter):
    """A log filter that drops a warning if it was shown less than 30 s ago.

    If the same logger has shown a different warning since then, the limit is 1 s.

    So "the store is full", "it takes pages again", "the store is full" are three lines, but one
    warning from a thousand failed calls is one line. Thread-safe.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._shown_s: dict[str, float] = {}
        self._latest: dict[str, str] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show `record`."""
        now_s = time.monotonic()
        with self._lock:
            repeated = self._latest.get(record.name) == record.msg
            interval_s = _REPEAT_INTERVAL_S if repeated else _ALTERNATING_INTERVAL_S
            if now_s - self._shown_s.get(record.msg, -math.inf) < interval_s:
                return False
            self._shown_s[record.msg] = now_s
            self._latest[record.name] = record.msg
            return True


@contextmanager
def warnings_to(handler: logging.Handler) -> Generator[None, None, None]:
    """Send the warnings of all loggers to `handler`, without repeats."""
    handler.setLevel(logging.WARNING)
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
