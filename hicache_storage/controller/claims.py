"""The slots that a request claims to recompute pages of a pool that some rank lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller.pools import PageSlots, PoolBits

    ReduceMin: TypeAlias = Callable[[str, Sequence[int]], Sequence[int]]
    """A function that returns the minimum of each value over all ranks, or zeros if a rank is lost."""


@dataclass(frozen=True, slots=True)
class _Claim:
    entry: Entry
    slot: int
    spare: bool
    """True for an extra slot: this rank has the page in its own slot, but another rank lacks it."""


class Claims:
    """The slots that one lease may write to, by pool. Not thread-safe: the lease's lock guards it.

    All ranks recompute a page that one of them lacks. A rank that has the page writes to a spare slot,
    because another request may be reading the page's own slot.
    """

    def __init__(
        self,
        cache: HostCache,
        entries: Sequence[Entry],
        local: Sequence[PoolBits],
        *,
        reduce_min: ReduceMin,
        offer: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Use the pages of a lease. `local` gives, for each page, the pools that have it on this rank.

        `offer` is called with filled pages, so that the write policy can select them.
        """
        self._cache = cache
        self._entries = entries
        self._local = local
        self._reduce_min = reduce_min
        self._offer = offer
        self._claims: dict[int, dict[int, _Claim]] = {}
        self._filled: set[tuple[int, int]] = set()

    def claim(self, number: int, pool: str, missing: Sequence[int]) -> dict[int, int]:
        """Claim slots for `missing` pages. Return this rank's slots of pages that all ranks claimed."""
        claims = self._claims.setdefault(number, {})
        new = {
            page: claim
            for page in missing
            if page not in claims and (claim := self._claim_page(number, page)) is not None
        }
        remote = number >= len(self._cache.pools)
        agreed: Sequence[int] = [0] * len(missing)
        try:
            claimable = [remote or page in claims or page in new for page in missing]
            agreed = self._reduce_min(f"the claims in {pool!r}", claimable)
        finally:
            for page, on_all_ranks in zip(missing, agreed, strict=True):
                if page in new and on_all_ranks:
                    claims[page] = new[page]
                elif page in new:
                    self._release(number, new[page])
        return {page: claim.slot for page, claim in claims.items()}

    def fill(self, number: int, pool: str, pages: Sequence[int]) -> None:
        """Mark claimed pages as written.

        Raises:
            ValueError: A page was not claimed. No page is marked then.
        """
        claims = self._claims.get(number, {})
        for page in pages:
            if page not in claims:
                raise ValueError(f"page {page} of pool {pool!r} is not claimed by this lease")
        filled = [claims.pop(page) for page in pages]
        self._filled.update((number, page) for page in pages)
        for claim in filled:
            if claim.spare:
                self._release(number, claim)
            else:
                self._cache.fill(claim.entry, 1 << number)
        self._offer([claim.entry for claim in filled])

    def release_all(self) -> None:
        """Give up the claims that were not filled."""
        by_pool, self._claims = self._claims, {}
        for number, claims in by_pool.items():
            for claim in claims.values():
                self._release(number, claim)

    def _claim_page(self, number: int, page: int) -> _Claim | None:
        """Claim a slot of this rank for a page, unless no slot is free or the page is already filled."""
        if number >= len(self._cache.pools) or (number, page) in self._filled:
            return None
        entry, bit = self._entries[page], 1 << number
        if self._local[page] & bit:
            groups = self._cache.allocate([bit])
            slot = groups[0][number] if groups else None
            return None if slot is None else _Claim(entry, slot, spare=True)
        if not self._cache.claim(entry, bit):
            return None
        slot = entry.slots[number]
        assert slot is not None, "a claimed pool has a slot"
        return _Claim(entry, slot, spare=False)

    def _release(self, number: int, claim: _Claim) -> None:
        if claim.spare:
            group: PageSlots = [None] * len(self._cache.pools)
            group[number] = claim.slot
            self._cache.free([group])
        else:
            self._cache.unclaim(claim.entry, 1 << number)
