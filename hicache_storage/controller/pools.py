"""The pools of a cache, each with its host slots and key space, and the pools that a page needs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from hicache_storage.host_pool.tiles import tile_nbytes
from hicache_storage.page_store.lookup import HitPolicy, PoolSpec, longest, usable_lengths
from hicache_storage.page_store.results import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hicache_storage.host_pool import HostPool, Tile
    from hicache_storage.keys import KeySpace

PoolBits: TypeAlias = int
"""A set of pools. Bit n stands for pool n."""
PageSlots: TypeAlias = "list[int | None]"
"""The slot of a page in each pool, in the order of the pools. None if it has no slot there."""


@cache
def pool_numbers(bits: PoolBits) -> tuple[int, ...]:
    """Return the numbers of the pools in `bits`."""
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePool:
    """One pool of the cache: the target's, a draft's, or a side pool."""

    space: KeySpace
    """The key space of pages without headers, for this rank's shard. A slot of `host` holds one page."""
    host: HostPool
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    window_pages: int = 1
    """For TRAILING_PAGES: how many pages before the end of the prefix are needed."""
    required: bool = True
    """True if no prefix is usable without this pool. False for an optional pool, such as a draft's."""
    writes: bool = True
    """True if this rank writes the pool's pages to L3. Of ranks with equal bytes, only one writes."""
    stored: tuple[PoolSpec, ...] = field(init=False, repr=False, compare=False)
    """The pool in the page store: one spec for each tile of the host pool. A page is in storage if all
    of its tiles are. The key of a tile is made from its own rectangle, so ranks share equal tiles."""

    def __post_init__(self) -> None:
        if self.space.page_nbytes != self.host.shape.nbytes:
            raise ValueError(
                f"pool {self.space.pool!r}: a page has {self.space.page_nbytes:,} bytes in the"
                f" key space, but {self.host.shape.nbytes:,} in the host pool"
            )
        if self.space.layout != self.host.layout:
            raise ValueError(
                f"pool {self.space.pool!r}: the key space has layout {self.space.layout!r}, but"
                f" the host pool has {self.host.layout!r}"
            )
        if len(self.host.tiles) > 1:
            self._check_tiles()
        stored = tuple(
            PoolSpec(
                space=self._tile_space(tile),
                hit_policy=self.hit_policy,
                window_pages=self.window_pages,
            )
            for tile in self.host.tiles
        )
        object.__setattr__(self, "stored", stored)

    def transfers(self, hashes: Sequence[str], slots: Sequence[int]) -> list[Transfer]:
        """Return one transfer of the pages in `slots` for each item of `stored`."""
        return [
            Transfer(pool.space, hashes, [self.host.tile_page(slot, tile) for slot in slots])
            for tile, pool in enumerate(self.stored)
        ]

    def _check_tiles(self) -> None:
        """Raise ValueError if the key space does not locate the tiles in the model."""
        shard, (layers, heads) = self.space.shard, _extent(self.host)
        if shard.layers[1] - shard.layers[0] != layers or (
            shard.heads is not None and shard.heads[1] - shard.heads[0] != heads
        ):
            raise ValueError(
                f"pool {self.space.pool!r}: the key space has {shard}, but the host pool"
                f" has {layers} layers of {heads} heads"
            )
        if shard.heads is None and any(
            tile.heads not in (None, (0, heads)) for tile in self.host.tiles
        ):
            raise ValueError(
                f"pool {self.space.pool!r}: its tiles split heads, but its key space has none:"
                " name the heads in its shard, or split layers only"
            )

    def _tile_space(self, tile: Tile) -> KeySpace:
        """Return the key space of a tile. If a page has only one tile, this is the page's key space."""
        if len(self.host.tiles) == 1:
            return self.space
        shard, (_, heads) = self.space.shard, _extent(self.host)
        rectangle = replace(
            shard,
            layers=_within(shard.layers, tile.layers),
            heads=shard.heads and _within(shard.heads, tile.heads or (0, heads)),
        )
        page_nbytes = tile_nbytes(self.host.shape, tile)
        return replace(self.space, shard=rectangle, page_nbytes=page_nbytes)


class PoolSet:
    """The pools of a cache, in order. Immutable."""

    def __init__(self, pools: Sequence[CachePool]) -> None:
        """Check that `pools` fit together.

        Raises:
            ValueError: There is no pool, no pool is required, or the pools do not fit together.
        """
        _check(pools)
        self.pools: tuple[CachePool, ...] = tuple(pools)
        self.all_pools: PoolBits = self._bits_where(lambda _: True)
        self.all_pages: PoolBits = self._bits_where(
            lambda pool: pool.hit_policy is HitPolicy.ALL_PAGES
        )
        """Pools in which every page has a slot."""
        self.trailing: int = self.all_pools & ~self.all_pages
        """Pools in which a page has a slot only if the window of some prefix needs it."""
        self.required: PoolBits = self._bits_where(lambda pool: pool.required)
        self.written: PoolBits = self._bits_where(lambda pool: pool.writes)
        """Pools that this rank writes to L3."""

    def __len__(self) -> int:
        return len(self.pools)

    @property
    def capacity_pages(self) -> int:
        """How many pages L2 can hold. Trailing pools may have fewer slots."""
        return min(self.pools[number].host.slots for number in pool_numbers(self.all_pages))

    def number(self, name: str) -> int:
        """Return the number of the pool with this name.

        Raises:
            ValueError: There is no such pool.
        """
        for number, pool in enumerate(self.pools):
            if pool.space.pool == name:
                return number
        known = ", ".join(repr(pool.space.pool) for pool in self.pools)
        raise ValueError(f"there is no pool {name!r}; this cache has {known}")

    def needed(self, page: int, length: int) -> PoolBits:
        """Return the pools in which a prefix of `length` pages needs the page with the index `page`."""
        needed = self.all_pages
        for number in pool_numbers(self.trailing):
            if page >= length - self.pools[number].window_pages:
                needed |= 1 << number
        return needed

    def needed_at(self, pages: int, ends: Collection[int]) -> list[PoolBits]:
        """Return, for each of `pages` pages, the pools that prefixes of any length in `ends` need."""
        needed = [self.all_pages] * pages
        for number in pool_numbers(self.trailing):
            for end in ends:
                for page in range(max(0, end - self.pools[number].window_pages), min(end, pages)):
                    needed[page] |= 1 << number
        return needed

    def usable(self, filled: Sequence[PoolBits], among: PoolBits) -> list[bool]:
        """Return, for each length from 0 on, whether that prefix is usable in all pools of `among`.

        `filled` gives, for each page, the pools that have it.
        """
        if not among & self.trailing:
            pages = len(filled)
            run = next((n for n, bits in enumerate(filled) if among & ~bits), pages)
            return [True] * (run + 1) + [False] * (pages - run)
        chosen = pool_numbers(among)
        rows = [[bool(bits >> number & 1) for bits in filled] for number in chosen]
        return usable_lengths([self.pools[number] for number in chosen], rows)

    def lookup_order(self, among: PoolBits) -> tuple[int, ...]:
        """Return the pools of `among` in the order in which they are looked up: required pools first."""
        return (*pool_numbers(among & self.required), *pool_numbers(among & ~self.required))

    def first_gap(self, filled: Sequence[PoolBits], among: PoolBits) -> tuple[int, int] | None:
        """Return the page that ends the prefix and the pool that lacks it, or None for a whole prefix.

        Only pools of `among` count. If several of them end the prefix, return the first one, in lookup
        order, that makes the prefix this short.
        """
        usable_pages = longest(self.usable(filled, among))
        so_far, before = 0, len(filled)
        for number in self.lookup_order(among):
            so_far |= 1 << number
            length = longest(self.usable(filled, so_far))
            if length == usable_pages < before:
                needed = (page for page in range(before) if self.needed(page, before) >> number & 1)
                return next(page for page in needed if not filled[page] >> number & 1), number
            before = length
        return None

    def _bits_where(self, applies: Callable[[CachePool], bool]) -> PoolBits:
        return sum(1 << number for number, pool in enumerate(self.pools) if applies(pool))


def _check(pools: Sequence[CachePool]) -> None:
    if not pools:
        raise ValueError("a cache needs at least one pool")
    if len({pool.space.id for pool in pools}) != len(pools):
        raise ValueError("two pools have the same key space: give each its own pool name")
    if len({pool.space.page_tokens for pool in pools}) != 1:
        raise ValueError("all pools of a cache must have the same page_tokens")
    if not any(pool.required and pool.hit_policy is HitPolicy.ALL_PAGES for pool in pools):
        raise ValueError("a cache needs a required pool with ALL_PAGES: that of the target")


def _extent(host: HostPool) -> tuple[int, int]:
    """Return how many layers and how many heads a page of a host pool has."""
    return host.shape.layers, host.shape.planes[0][0]


def _within(whole: tuple[int, int], part: tuple[int, int]) -> tuple[int, int]:
    """Return the range `part`, which counts from the start of `whole`, as absolute numbers."""
    return whole[0] + part[0], whole[0] + part[1]
