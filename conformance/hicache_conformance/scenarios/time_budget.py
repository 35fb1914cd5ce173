"""How much to ask of a store, so that a slow one is asked for less."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

T = TypeVar("T")

_SOME = 6


class TimeBudget:
    """What pages have cost so far, to stop before more of them take too long.

    for count in (10, 100, 1000):
        if not pace.allows(count):
            break
        with pace.measured(count):
            ...
    """

    def __init__(self, limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s
        self._cost_s = 0.0

    def allows(self, count: int) -> bool:
        """Whether so many pages will be done in time, at the cost of the last ones."""
        return time.monotonic() + count * self._cost_s < self._until_s

    @contextmanager
    def measured(self, count: int) -> Generator[None, None, None]:
        """Something is done with `count` pages."""
        began_s = time.monotonic()
        yield
        self._cost_s = (time.monotonic() - began_s) / count

    def shortened(self, items: Sequence[T]) -> Sequence[T]:
        """`items`, or some from all over them where there is no time for all."""
        return items if self.allows(len(items)) else items[:: -(-len(items) // _SOME)]
