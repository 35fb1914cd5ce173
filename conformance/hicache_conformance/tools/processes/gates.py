"""Pages that hold a call half way, so that a check decides what happens meanwhile.

If a store goes through the segments of a page one by one, it is held in the middle of the page. If
it takes the page as a whole, it is held before or while it does that.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator

HELD_LIMIT_S = 30.0
"""How long a call is held at most, so that no call hangs when its test has ended."""


class Gate:
    """A gate that holds every caller until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        """Set when the first caller arrives."""
        self._opened = threading.Event()

    def hold(self) -> None:
        """Wait until the gate is opened."""
        if not self._opened.is_set():
            self.reached.set()
            self._opened.wait(HELD_LIMIT_S)

    def open(self) -> None:
        self._opened.set()


class GatedSegments(tuple[memoryview, ...]):  # noqa: SLOT001 - a tuple can have none
    """Segments that hold an iteration before one of them."""

    gate: Gate
    before: int

    def __iter__(self) -> Iterator[memoryview]:
        for index, view in enumerate(super().__iter__()):
            if index == self.before:
                self.gate.hold()
            yield view


class GatedPage(Page):
    """A page that stops the store until the gate opens.

    The store stops before it gets the segment number `before`. If that is 0, it stops at its first
    access to the page.
    """

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
        # A store that has the address needs no further access.
        if name == "addresses" or self._before == 0:
            self._gate.hold()
            return value
        segments = GatedSegments(value)
        segments.gate, segments.before = self._gate, self._before
        return segments
