"""The pools of a cache as one thing: which of them a prefix needs where, and how long it is usable."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hicache_storage.page_store.lookup import HitPolicy, longest, usable_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeAlias

    from hicache_storage.controller.pools import CachePool

    Bits: TypeAlias = int
    """Some of the pools: bit n stands for pool n."""
    PageSlots: TypeAlias = list[int | None]
    """A page's slot in each pool, in the order of the pools; None where it has none."""


@cache
def numbers(bits: Bits) -> tuple[int, ...]:
    """The pools that `bits` stand for."""
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


class PoolSet:
    """The pools of a cache, in order, target and draft and side pools alike. Immutable."""

    def __init__(self, pools: Sequence[CachePool]) -> None:
        """Check that `pools` go together.

        Raises:
            ValueError: There is none, none is required, or they do not fit each other.
        """
        _check(pools)
        self.pools = tuple(pools)
        self.everything = self._which(lambda _: True)
        self.every_page = self._which(lambda pool: pool.hit_policy is HitPolicy.ALL_PAGES)
        """Pools of which each page has a slot."""
        self.trailing = self.everything & ~self.every_page
        """Pools of which a page has a slot only where some prefix's window needs it."""
        self.required = self._which(lambda pool: pool.required)
        self.written = self._which(lambda pool: pool.writes)
        """Pools that this rank writes to L3."""

    def __len__(self) -> int:
        return len(self.pools)

    @property
    def capacity_pages(self) -> int:
        """How many pages L2 can hold: trailing pools may have fewer slots."""
        return min(self.pools[number].host.slots for number in numbers(self.every_page))

    def number(self, name: str) -> int:
        """The pool that its key space calls `name`.

        Raises:
            ValueError: There is none.
        """
        for number, pool in enumerate(self.pools):
            if pool.space.pool == name:
                return number
        known = ", ".join(repr(pool.space.pool) for pool in self.pools)
        raise ValueError(f"there is no pool {name!r}; this cache has {known}")

    def needed(self, page: int, length: int) -> Bits:
        """The pools that a prefix of `length` pages needs at `page`."""
        needed = self.every_page
        for number in numbers(self.trailing):
            if page >= length - self.pools[number].window_pages:
                needed |= 1 << number
        return needed

    def needed_at(self, pages: int, ends: Collection[int]) -> list[Bits]:
        """For each of `pages` pages, the pools that prefixes of any of these lengths need at it."""
        needed = [self.every_page] * pages
        for number in numbers(self.trailing):
            for end in ends:
                for page in range(max(0, end - self.pools[number].window_pages), min(end, pages)):
                    needed[page] |= 1 << number
        return needed

    def usable(self, filled: Sequence[Bits], among: Bits) -> list[bool]:
        """For each length from 0 on: is that prefix usable in all pools of `among`?

        `filled` tells for each page which pools have it.
        """
        if not among & self.trailing:
            pages = len(filled)
            run = next((n for n, bits in enumerate(filled) if among & ~bits), pages)
            return [True] * (run + 1) + [False] * (pages - run)
        chosen = numbers(among)
        rows = [[bool(bits >> number & 1) for bits in filled] for number in chosen]
        return usable_lengths([self.pools[number] for number in chosen], rows)

    def in_order(self, among: Bits) -> tuple[int, ...]:
        """The pools of `among` as storage is asked for them: those that are required first."""
        return (*numbers(among & self.required), *numbers(among & ~self.required))

    def first_gap(self, filled: Sequence[Bits], among: Bits) -> tuple[int, int] | None:
        """The page and the pool of `among` for want of which the prefix is no longer; None: it is whole.

        Of several pools it is the first in order without which no more is usable than with all of them.
        """
        usable_pages = longest(self.usable(filled, among))
        so_far, before = 0, len(filled)
        for number in self.in_order(among):
            so_far |= 1 << number
            length = longest(self.usable(filled, so_far))
            if length == usable_pages < before:
                needed = (page for page in range(before) if self.needed(page, before) >> number & 1)
                return next(page for page in needed if not filled[page] >> number & 1), number
            before = length
        return None

    def _which(self, applies: Callable[[CachePool], bool]) -> Bits:
        return sum(1 << number for number, pool in enumerate(self.pools) if applies(pool))


def _check(pools: Sequence[CachePool]) -> None:
    if not pools:
        raise ValueError("a cache needs at least one pool")
    if len({pool.space.id for pool in pools}) != len(pools):
        raise ValueError("two pools have the same key space: give each its own pool name")
    if len({pool.space.page_tokens for pool in pools}) != 1:
        raise ValueError("all pools of a cache have the same page_tokens")
    if not any(pool.required and pool.hit_policy is HitPolicy.ALL_PAGES for pool in pools):
        raise ValueError("a cache needs a required pool of ALL_PAGES: the target's")
