"""Clocks: one that a test sets by hand, and one that stands while the machine runs something else."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from hicache_conformance.tools.processes.machine import MachineDelay


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
