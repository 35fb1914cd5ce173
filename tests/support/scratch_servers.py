"""Servers of one test: one for each scratch of the kit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, Self, TypeVar

from servers import ServerProcess

S = TypeVar("S", bound=ServerProcess)


class ScratchServers(Generic[S]):
    """Starts a server for each prefix. After the test no server is started. Thread-safe.

    A check whose call hangs is left behind in its thread. The end of the server ends the call, and
    the check then asks for the next server.
    """

    def __init__(self, make: Callable[[Path], S], directory: Path) -> None:
        self.directory = directory
        self._make = make
        self._lock = threading.Lock()
        self._running: dict[str, S] = {}
        self._stack = ExitStack()
        self._ended = False

    def of(self, prefix: str) -> S:
        """Return the server of a scratch, which is started at the first call.

        Raises:
            RuntimeError: The test has ended.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError("the test has ended: it gets no more servers")
            if prefix not in self._running:
                made = self._make(self.directory / prefix)
                self._stack.enter_context(made)
                self._running[prefix] = made
            return self._running[prefix]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            self._stack.close()
