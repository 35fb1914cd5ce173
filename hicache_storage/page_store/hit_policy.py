"""How long a prefix is usable when several pools must all have their part of it.

Source of the policies: sglang/srt/mem_cache/hicache_storage.py, `PoolHitPolicy`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace


class HitPolicy(enum.Enum):
    """Which pages of a pool a prefix needs."""

    ALL_PAGES = "all_pages"
    """Every page: attention KV, draft KV, indexers."""
    TRAILING_PAGES = "trailing_pages"
    """The last `window_pages` only: sliding windows, Mamba states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool of a request's pages as the page store sees it: target, draft and side pools alike."""

    space: KeySpace
    """As the engine knows it: bare, without a frame."""
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 1
    """For TRAILING_PAGES: how many pages in front of the prefix's end are needed."""

    def __post_init__(self) -> None:
        if self.space.frame_nbytes:
            raise ValueError("a pool's key space is bare: the page store adds the frame")
        check_integer("window_pages", self.window_pages, least=1)


class HasHitPolicy(Protocol):
    """Whatever knows which pages a prefix needs of it."""

    @property
    def hit_policy(self) -> HitPolicy: ...

    @property
    def window_pages(self) -> int: ...


def usable_too(usable: Sequence[bool], pool: HasHitPolicy, there: Sequence[bool]) -> list[bool]:
    """For each prefix length from 0 to n: was it `usable` so far, and can it be used in this pool too?

    `there[i]`, of n, tells whether the pool has page i. Length 0 is always usable. A list and not a
    number, because with a trailing pool 5 pages can be usable where 4 are not.
    """
    pages = len(there)
    if pool.hit_policy is HitPolicy.ALL_PAGES:
        first_missing = there.index(False) if False in there else pages
        return [*usable[: first_missing + 1], *[False] * (pages - first_missing)]
    missing_before = list(accumulate((not page for page in there), initial=0))
    return [
        before and missing_before[end] == missing_before[max(0, end - pool.window_pages)]
        for end, before in enumerate(usable)
    ]


def longest(usable: Sequence[bool]) -> int:
    """The longest of the usable prefix lengths, in pages."""
    return len(usable) - 1 - usable[::-1].index(True)


def usable_lengths(pools: Sequence[HasHitPolicy], present: Sequence[Sequence[bool]]) -> list[bool]:
    """For each prefix length from 0 to n: can it be used in every pool?

    `present[p][i]`, of n, tells whether pool p has page i.
    """
    usable = [True] * (len(present[0]) + 1)
    for pool, there in zip(pools, present, strict=True):
        usable = usable_too(usable, pool, there)
    return usable


def usable_prefix(pools: Sequence[HasHitPolicy], present: Sequence[Sequence[bool]]) -> int:
    """The longest prefix, in pages, that is usable in every pool."""
    return longest(usable_lengths(pools, present))
