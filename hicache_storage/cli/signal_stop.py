"""Turn the first SIGINT or SIGTERM into an event, for verbs that must finish their work properly."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class SignalStop:
    """An event that the first SIGINT or SIGTERM sets. A second signal has its usual effect."""

    def __init__(self) -> None:
        self.event: threading.Event = threading.Event()
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _frame: object) -> None:
        self.signal = number
        self.event.set()
        self.__exit__()
