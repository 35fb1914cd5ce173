"""A time budget, so that a check asks less of a slow store."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

T = TypeVar("T")

_SOME = 6


class TimeBudget:
    """The cost of the pages so far, so that a check stops before more pages take too long.

    for count in (10, 100, 1000):
        if not budget.allows(count):
            break
        with budget.measured(count):
            ...
    """

    def __init__(self, limit_s: float = 4.0) -> None:
        self._until_s = time.monotonic() + limit_s
        self._cost_s = 0.0

    def allows(self, count: int) -> bool:
        """Return whether `count` pages end in time at the cost of the last ones."""
        return time.monotonic() + count * self._cost_s < self._until_s

    @contextmanager
    def measured(self, count: int) -> Generator[None, None, None]:
        """Measure the block, which uses `count` pages."""
        began_s = time.monotonic()
        yield
        self._cost_s = (time.monotonic() - began_s) / count

    def shortened(self, items: Sequence[T]) -> Sequence[T]:
        """Return `items`, or some from all over them where the time is too short for all."""
        return items if self.allows(len(items)) else items[:: -(-len(items) // _SOME)]
