"""How a page, and a prefix, can be used: by target and draft, by the target alone, or not at all."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits


class Coverage(enum.Enum):
    """Which pools have what a prefix needs of a page; of a prefix: of all its pages."""

    BOTH = "both"
    """All of them: the target's and the draft's."""
    TARGET_ONLY = "target_only"
    """The required ones. The draft must compute the page again, or do without it."""
    NONE = "none"
    """Not even those: the page must be computed."""


class Pools(Protocol):
    """Whatever knows which pools a prefix needs where."""

    def needed(self, page: int, length: int) -> Bits: ...


def coverage(
    pools: Pools, filled: Sequence[Bits], length: int, *, target_pages: int, asked_pages: int
) -> list[Coverage]:
    """For each page that was asked for, given a prefix of `length` pages with these pools `filled`.

    Behind the prefix's end, `target_pages` tells how far the required pools would have gone: TARGET_ONLY
    is then what the draft's absence has cost.
    """
    pages = [
        Coverage.TARGET_ONLY if pools.needed(page, length) & ~filled[page] else Coverage.BOTH
        for page in range(length)
    ]
    pages += [Coverage.TARGET_ONLY] * (target_pages - length)
    return pages + [Coverage.NONE] * (asked_pages - len(pages))


def verdict(pages: Sequence[Coverage]) -> Coverage:
    """Of a usable prefix as a whole."""
    if not pages:
        return Coverage.NONE
    return Coverage.TARGET_ONLY if Coverage.TARGET_ONLY in pages else Coverage.BOTH
