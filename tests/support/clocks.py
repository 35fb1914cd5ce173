"""A clock that a test sets by hand."""

from __future__ import annotations

import time

import pytest


class Clock:
    """A clock in place of `time.monotonic` until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", self.monotonic)

    def monotonic(self) -> float:
        return self.now_s
