"""Servers of one test, one for each scratch of the kit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, Self, TypeVar

from servers import ServerProcess

S = TypeVar("S", bound=ServerProcess)


class ScratchServers(Generic[S]):
    """The servers of one test, each started for one prefix. None is started after the test.

    If a call of a check hangs, the check is left behind in its thread. When its server ends, the
    call ends too, and the check then asks for another server. Thread-safe.
    """

    def __init__(self, make: Callable[[Path], S], directory: Path) -> None:
        self.directory = directory
        self._make = make
        self._lock = threading.Lock()
        self._running: dict[str, S] = {}
        self._stack = ExitStack()
        self._ended = False

    def of(self, prefix: str) -> S:
        """Return the server of a scratch. The first call starts it.

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
