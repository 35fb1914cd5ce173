"""A name server that a test controls, in place of the system's lookups."""

from __future__ import annotations

import socket
import threading
from typing import Any


def look_ups() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("hicache-look-up")]


class Names:
    """Replies in place of `socket.getaddrinfo`. A lookup hangs while the event `answers` is clear."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.hosts = ["127.0.0.1"]
        self.error: OSError | None = None

    def look_up(self, host: str, *_: object, **__: object) -> list[tuple[Any, ...]]:
        self.answers.wait(60)
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in self.hosts]
