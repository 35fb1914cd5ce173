"""What a rank's process tells the one that started it: pairs of a kind and what is told."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hicache_storage.replay.repeats import WithoutRepeats

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.connection import Connection


class RankReporter:
    """The rank's end. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, told: Any) -> None:
        """Tell it, where somebody still listens."""
        with self._lock:
            try:
                self._connection.send((kind, told))
            except OSError:  # the run was ended
                return

    @contextmanager
    def warnings(self) -> Generator[None, None, None]:
        """Send this process's warnings too, without repeats."""
        handler = _Sender(self)
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)


class _Sender(logging.Handler):
    def __init__(self, relay: RankReporter) -> None:
        super().__init__(logging.WARNING)
        self._relay = relay
        self.addFilter(WithoutRepeats())

    def emit(self, record: logging.LogRecord) -> None:
        self._relay.send("warning", (record.name, record.levelno, record.getMessage()))


def replayed_warning(rank: int, told: tuple[str, int, str]) -> None:
    """Log in this process what a rank had to say."""
    name, level, text = told
    logging.getLogger(name).log(level, f"rank {rank}: {text}")  # noqa: G004 - each is said once
