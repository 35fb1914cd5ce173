"""Pages that hold a call half way, so that what happens meanwhile is chosen and not left to luck.

A store that goes through a page's segments one by one is held in the middle of the page; one that takes
the page as a whole is held before or while it does.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_LIMIT_S = 30.0
"""No call is held longer, so that none hangs when its test has ended."""


class Gate:
    """A closed gate. Holds whoever comes to it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        """Somebody has come to it."""
        self._opened = threading.Event()

    def hold(self) -> None:
        """Wait here until it is opened."""
        if not self._opened.is_set():
            self.reached.set()
            self._opened.wait(HELD_LIMIT_S)

    def open(self) -> None:
        self._opened.set()


class GatedSegments(tuple[memoryview, ...]):  # noqa: SLOT001 - a tuple can have none
    """Segments that hold who iterates over them, in front of one of them."""

    gate: Gate
    before: int

    def __iter__(self) -> Iterator[memoryview]:
        for index, view in enumerate(super().__iter__()):
            if index == self.before:
                self.gate.hold()
            yield view


class GatedPage(Page):
    """A page that holds the store in front of segment `before`; 0: at the first touch."""

    __slots__ = ("_before", "_gate")

    def __init__(self, page: Page, gate: Gate, *, before: int = 0) -> None:
        self._gate: Gate | None = None
        self._before = before if len(page.segments) > 1 else 0
        super().__init__(*page.segments)
        self._gate = gate

    def tobytes(self) -> bytes:
        return b"".join([bytes(view) for view in self.segments])

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name not in ("segments", "addresses") or self._gate is None:
            return value
        if name == "addresses" or self._before == 0:  # who has an address goes on without us
            self._gate.hold()
            return value
        segments = GatedSegments(value)
        segments.gate, segments.before = self._gate, self._before
        return segments
