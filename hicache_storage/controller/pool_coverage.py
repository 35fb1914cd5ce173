"""Find out whether all pools have the pages of a prefix, or only the required pools."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.controller.pools import PoolBits


class Coverage(enum.Enum):
    """The pools that have a page, or a whole prefix: all pools, only the required ones, or fewer."""

    BOTH = "both"
    """All pools, the target's and the draft's."""
    TARGET_ONLY = "target_only"
    """Only the required pools. The draft must recompute the page or do without it."""
    NONE = "none"
    """Not all of the required pools. The page must be computed."""


def page_coverage(
    needed: Callable[[int, int], PoolBits],
    filled: Sequence[PoolBits],
    length: int,
    *,
    target_pages: int,
    asked_pages: int,
) -> list[Coverage]:
    """Return the coverage of each requested page, given a prefix of `length` pages.

    `needed(page, length)` gives the pools that the prefix needs at a page, and `filled` the pools that
    have the page. `target_pages` is the length of the prefix that the required pools have.
    """
    pages = [
        Coverage.TARGET_ONLY if needed(page, length) & ~filled[page] else Coverage.BOTH
        for page in range(length)
    ]
    pages += [Coverage.TARGET_ONLY] * (target_pages - length)
    return pages + [Coverage.NONE] * (asked_pages - len(pages))


def prefix_coverage(pages: Sequence[Coverage]) -> Coverage:
    """Return the coverage of a prefix: the worst coverage of its pages, or NONE if it is empty."""
    if not pages:
        return Coverage.NONE
    return Coverage.TARGET_ONLY if Coverage.TARGET_ONLY in pages else Coverage.BOTH
