"""Which warnings of a run are shown: each change is, the same complaint over and over is not."""

from __future__ import annotations

import logging
import math
import threading
import time

_SAME_AGAIN_S = 30.0
_ALTERNATING_S = 1.0


class WithoutRepeats(logging.Filter):
    """Lets a message through again after 30 s, or after 1 s where its logger has said another one since.

    "the store is full", "it takes pages again", "the store is full" are three lines, and thousands of
    failed calls are one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._shown_s: dict[str, float] = {}
        self._latest: dict[str, str] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to show it."""
        now_s = time.monotonic()
        with self._lock:
            same = self._latest.get(record.name) == record.msg
            pause_s = _SAME_AGAIN_S if same else _ALTERNATING_S
            if now_s - self._shown_s.get(record.msg, -math.inf) < pause_s:
                return False
            self._shown_s[record.msg] = now_s
            self._latest[record.name] = record.msg
            return True
