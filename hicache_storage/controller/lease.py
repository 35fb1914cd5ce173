"""The two ways in which a request uses L2: a lease of its usable prefix, a reservation of new slots."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hicache_storage.controller.claims import Claims
from hicache_storage.controller.pool_coverage import Coverage, page_coverage, prefix_coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.claims import ReduceMin
    from hicache_storage.controller.consensus import AgreedPages
    from hicache_storage.controller.eviction import Entry
    from hicache_storage.controller.pools import PageSlots


class Lease:
    """The usable prefix of a request, pinned in L2 until `release`. A context manager.

    Its properties describe the prefix as it was when the lease was taken. They list a slot only if the
    slot holds its page. With several ranks, a page counts only if every rank has it, so the properties
    are the same on each rank.
    """

    def __init__(
        self,
        cache: HostCache,
        entries: list[Entry],
        loaded: list[int],
        agreed: AgreedPages,
        *,
        reduce_min: ReduceMin,
        offer: Callable[[Sequence[Entry]], None],
    ) -> None:
        self.cache = cache
        self.entries = entries
        self.loaded = loaded
        """The indices of the pages that this rank loaded from L3 for this request, in any pool."""
        self._pools = agreed.pools
        self._filled = agreed.filled[: len(entries)]
        self._target_pages = agreed.target_pages
        self._asked_pages = len(agreed.filled)
        self._claims = Claims(cache, entries, agreed.local, reduce_min=reduce_min, offer=offer)
        self._held = True
        self._lock = threading.Lock()

    @property
    def pages(self) -> int:
        """The length of the prefix."""
        return len(self.entries)

    @property
    def l2_pages(self) -> int:
        """How many pages of the prefix were already in L2."""
        return len(self.entries) - len(self.loaded)

    @property
    def l3_pages(self) -> int:
        """How many pages of the prefix came from L3."""
        return len(self.loaded)

    @property
    def coverage(self) -> list[Coverage]:
        """The coverage of each requested page.

        A page after the prefix is TARGET_ONLY if the required pools have it in L2, or if L3 reports it.
        Such a page is not in the prefix because an optional pool lacks a page.
        """
        return page_coverage(
            self._pools.needed,
            self._filled,
            self.pages,
            target_pages=self._target_pages,
            asked_pages=self._asked_pages,
        )

    @property
    def verdict(self) -> Coverage:
        """The coverage of the prefix: TARGET_ONLY if `missing` names pages, NONE for an empty prefix."""
        return prefix_coverage(self.coverage[: self.pages])

    @property
    def target_only_pages(self) -> int:
        """How many pages of the prefix some optional pool lacks."""
        all_pools = self._pools.all_pools
        if not any(all_pools & ~bits for bits in self._filled):
            return 0
        return self.coverage[: self.pages].count(Coverage.TARGET_ONLY)

    @property
    def indices(self) -> list[list[int]]:
        """For each pool, the indices of the pages of the prefix that the pool has.

        These are all pages, except in trailing pools and for pages that `missing` names.
        """
        return [
            [page for page, bits in enumerate(self._filled) if bits >> number & 1]
            for number in range(len(self.cache.pools))
        ]

    @property
    def slots(self) -> list[list[int]]:
        """For each pool, the slots of the pages in `indices`."""
        return [
            [slot for page in pages if (slot := self.entries[page].slots[number]) is not None]
            for number, pages in enumerate(self.indices)
        ]

    def missing(self, pool: str) -> list[int]:
        """Return the pages of the prefix that a pool needs but lacks. Recompute or skip them.

        Raises:
            ValueError: There is no such pool.
        """
        return self._missing(self._pools.number(pool))

    def claim(self, pool: str) -> dict[int, int]:
        """Return the missing pages of a pool that this request may compute, with the slots to write to.

        Pages that another request is filling are left out. After `release` the result is empty.
        Idempotent.

        With several ranks, call it on every rank, in the order in which you take results. All ranks get
        the same pages: those for which every rank has a slot. A rank without the pool gets no page.

        Raises:
            ValueError: There is no such pool.
        """
        number = self._pools.number(pool)
        with self._lock:
            missing = self._missing(number)
            if not (self._held and missing):
                return {}
            return self._claims.claim(number, pool, missing)

    def fill(self, pool: str, pages: Iterable[int]) -> None:
        """Add claimed pages that you have written to L2. The write policy selects those that go to L3.

        Raises:
            ValueError: A page was not claimed, or the lease was released. No page is added then.
        """
        number = self._pools.number(pool)
        with self._lock:
            self._claims.fill(number, pool, list(pages))

    def release(self) -> None:
        """Unpin the pages. The request must not use their slots any more. Idempotent."""
        with self._lock:
            was_held, self._held = self._held, False
            if was_held:
                self._claims.release_all()
        if was_held:
            self.cache.unpin(self.entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _missing(self, number: int) -> list[int]:
        needed = self._pools.needed
        return [
            page
            for page, bits in enumerate(self._filled)
            if needed(page, self.pages) & ~bits & 1 << number
        ]


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots for pages that a request is about to fill. End it with `commit` or `abandon`."""

    cache: HostCache
    hashes: list[str]
    groups: list[PageSlots]
    _open: bool = field(default=True, init=False)
    _closing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def pages(self) -> int:
        """How many leading pages have slots."""
        return len(self.groups)

    @property
    def indices(self) -> list[list[int]]:
        """For each pool, the indices of the pages with a slot: all pages, except in trailing pools."""
        return [
            [page for page, slots in enumerate(self.groups) if slots[number] is not None]
            for number in range(len(self.cache.pools))
        ]

    @property
    def slots(self) -> list[list[int]]:
        """For each pool, the slots of the pages in `indices`."""
        return [
            [slot for slots in self.groups if (slot := slots[number]) is not None]
            for number in range(len(self.cache.pools))
        ]

    def close(self) -> bool:
        """End the reservation. Return True to the first caller, False to later ones, in any thread."""
        with self._closing:
            was_open, self._open = self._open, False
        return was_open

    def abandon(self) -> None:
        """Free the slots. Idempotent. Do nothing after a commit."""
        if self.close():
            self.cache.free(self.groups)
