"""How many calls are under way in one process: a close waits for none, the last of them closes up."""

from __future__ import annotations

import threading


class CallGate:
    """Thread-safe; belongs to the process that made it, since a fork takes no caller along."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False

    def begin(self) -> bool:
        """Whether a call may begin: not after a close. Then `end` follows."""
        with self._lock:
            self._count += not self._closed
            return not self._closed

    def end(self) -> bool:
        """Whether that was the last call after a close."""
        with self._lock:
            self._count -= 1
            return self._closed and not self._count

    def close(self) -> bool:
        """Let no more begin; whether this is the first close, and no call is under way."""
        with self._lock:
            first, self._closed = not self._closed, True
            return first and not self._count
