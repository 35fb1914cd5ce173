"""How a page, and a prefix, can be used: by target and draft, by the target alone, or not at all."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from hicache_storage.hit_policy import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits, PoolSet


class Coverage(enum.Enum):
    """Which pools have what a prefix needs of a page; of a prefix: of all its pages."""

    BOTH = "both"
    """All of them: the target's and the draft's."""
    TARGET_ONLY = "target_only"
    """The required ones. The draft must compute the page again, or do without it."""
    NONE = "none"
    """Not even those: the page must be computed."""


def coverage(
    pool_set: PoolSet, filled: Sequence[Bits], length: int, known: Sequence[Bits]
) -> list[Coverage]:
    """For each page that was asked for, given a prefix of `length` pages with these pools `filled`.

    Behind the prefix's end, `known` tells what storage said that it has: TARGET_ONLY is then what the
    draft's absence has cost.
    """
    pages = [
        Coverage.TARGET_ONLY if pool_set.needed(page, length) & ~filled[page] else Coverage.BOTH
        for page in range(length)
    ]
    target_pages = longest(pool_set.usable(known, pool_set.required))
    pages += [Coverage.TARGET_ONLY] * (target_pages - length)
    return pages + [Coverage.NONE] * (len(known) - len(pages))


def verdict(pages: Sequence[Coverage]) -> Coverage:
    """Of a usable prefix as a whole."""
    if not pages:
        return Coverage.NONE
    return Coverage.TARGET_ONLY if Coverage.TARGET_ONLY in pages else Coverage.BOTH
