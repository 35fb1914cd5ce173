"""Time in tests: a clock that is set by hand, durations and limits that do not depend on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TypeVar

import pytest
from hicache_conformance.tools.processes.machine import MachineDelay

from hicache_storage.errors import StorageTimeout

T = TypeVar("T")


class Clock:
    """A clock in place of `time.monotonic` until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", self.monotonic)

    def monotonic(self) -> float:
        return self.now_s


class Stopwatch:
    """The time since it was made, without waits for a processor."""

    def __init__(self) -> None:
        self._began_s, self._delay = time.monotonic(), MachineDelay()

    def so_far_s(self) -> float:
        return time.monotonic() - self._began_s - self._delay.so_far_s()


@contextmanager
def ends_in(limit_s: float) -> Generator[None]:
    """Fail if the block takes `limit_s` or longer, without waits for a processor."""
    watch = Stopwatch()
    yield
    took_s = watch.so_far_s()
    assert took_s < limit_s


def in_time(call: Callable[[], T]) -> T:
    """Return `call()`. Try again if a busy machine does not end it within a short time limit."""
    for _ in range(4):
        with suppress(StorageTimeout):
            return call()
    return call()
