"""The verdict on a prefix and its pages: all pools have it, only the target's, or none."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.controller.pools import PoolBits


class Coverage(enum.Enum):
    """The pools that have a page of a prefix; for a prefix, the pools that have all of its pages."""

    BOTH = "both"
    """All pools: the target's and the draft's."""
    TARGET_ONLY = "target_only"
    """The required pools only. The draft must recompute the page, or do without it."""
    NONE = "none"
    """Not all required pools: the page must be computed."""


def page_coverage(
    needed: Callable[[int, int], PoolBits],
    filled: Sequence[PoolBits],
    length: int,
    *,
    target_pages: int,
    asked_pages: int,
) -> list[Coverage]:
    """Return the coverage of each requested page, given a prefix of `length` pages.

    `needed(page, length)` gives the pools that the prefix needs at a page, `filled` the pools that have
    the page. Behind the prefix, `target_pages` is the length that the required pools have.
    """
    pages = [
        Coverage.TARGET_ONLY if needed(page, length) & ~filled[page] else Coverage.BOTH
        for page in range(length)
    ]
    pages += [Coverage.TARGET_ONLY] * (target_pages - length)
    return pages + [Coverage.NONE] * (asked_pages - len(pages))


def prefix_coverage(pages: Sequence[Coverage]) -> Coverage:
    """Return the coverage of a prefix, given that of its pages: the worst of them, or NONE."""
    if not pages:
        return Coverage.NONE
    return Coverage.TARGET_ONLY if Coverage.TARGET_ONLY in pages else Coverage.BOTH
