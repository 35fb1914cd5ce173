"""Pages of L2 in the hands of a request: a usable prefix, or room for new pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hicache_storage.controller.claims import Claims
from hicache_storage.controller.coverage import Coverage, coverage, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.claims import Ask
    from hicache_storage.controller.consensus import Taken
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import PageSlots


class Lease:
    """The usable prefix of a request, pinned in L2 until `release`. A context manager.

    It tells what was there when it was taken; a slot is told only where it holds its page. With several
    ranks it tells the same on each of them: a page is there where every rank has it.
    """

    def __init__(
        self,
        cache: HostCache,
        entries: list[Entry],
        loaded: list[int],
        taken: Taken,
        *,
        ask: Ask,
        consider: Callable[[Sequence[Entry]], None],
    ) -> None:
        self.cache = cache
        self.entries = entries
        self.loaded = loaded
        """Indices of the pages that came from L3 for this request, in any pool, on this rank."""
        self._pools = taken.pools
        self._filled = taken.filled[: len(entries)]
        self._target_pages = taken.target_pages
        self._asked_pages = len(taken.filled)
        self._claims = Claims(cache, entries, taken.here, ask=ask, consider=consider)
        self._held = True
        self._lock = threading.Lock()

    @property
    def pages(self) -> int:
        """Length of the prefix."""
        return len(self.entries)

    @property
    def l2_pages(self) -> int:
        """Pages that L2 had."""
        return len(self.entries) - len(self.loaded)

    @property
    def l3_pages(self) -> int:
        """Pages that came from L3."""
        return len(self.loaded)

    @property
    def coverage(self) -> list[Coverage]:
        """Of each page that was asked for.

        Behind the prefix, TARGET_ONLY tells of pages that L2 has, or L3 said that it has, for the target
        and not for the draft.
        """
        return coverage(
            self._pools,
            self._filled,
            self.pages,
            target_pages=self._target_pages,
            asked_pages=self._asked_pages,
        )

    @property
    def verdict(self) -> Coverage:
        """Of the prefix: BOTH, TARGET_ONLY where `missing` has pages, NONE where it is empty."""
        return verdict(self.coverage[: self.pages])

    @property
    def target_only_pages(self) -> int:
        """Pages of the prefix that the draft lacks."""
        everything = self._pools.everything
        if not any(everything & ~bits for bits in self._filled):
            return 0
        return self.coverage[: self.pages].count(Coverage.TARGET_ONLY)

    @property
    def indices(self) -> list[list[int]]:
        """For each pool, the pages of the prefix that it holds: all of them, but for trailing pools and
        where `missing` names some."""
        return [
            [page for page, bits in enumerate(self._filled) if bits >> number & 1]
            for number in range(len(self.cache.pools))
        ]

    @property
    def slots(self) -> list[list[int]]:
        """For each pool, the slots of the pages that `indices` names."""
        return [
            [slot for page in pages if (slot := self.entries[page].slots[number]) is not None]
            for number, pages in enumerate(self.indices)
        ]

    def missing(self, pool: str) -> list[int]:
        """The pages of the prefix that a pool needs and lacks: to be computed again, or done without.

        Raises:
            ValueError: There is no such pool.
        """
        return self._missing(self._pools.number(pool))

    def claim(self, pool: str) -> dict[int, int]:
        """The missing pages of a pool that this request may compute, each with the slot to write it to.

        Not those that another request is filling, and none after `release`. Idempotent. With several
        ranks every rank calls it, in the order in which it takes its results, and gets the same pages:
        those that every rank has a slot for. A rank that has no such pool calls it too, and gets none.

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
        """Claimed pages of a pool are written: they are L2's from now on, and L3's by write policy.

        Raises:
            ValueError: A page was not claimed, or the lease was released. None is filled then.
        """
        number = self._pools.number(pool)
        with self._lock:
            self._claims.fill(number, pool, list(pages))

    def release(self) -> None:
        """Unpin the pages; their slots are not the request's any more. Idempotent."""
        with self._lock:
            was_held, self._held = self._held, False
            if was_held:
                self._claims.give_back()
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
    """Slots for pages that a request is about to fill: then `commit` it, or `abandon` it."""

    cache: HostCache
    hashes: list[str]
    groups: list[PageSlots]
    _open: bool = field(default=True, init=False)
    _closing: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def pages(self) -> int:
        """How many pages there is room for: a leading part of what was asked."""
        return len(self.groups)

    @property
    def indices(self) -> list[list[int]]:
        """For each pool, the pages that have a slot in it: all of them, but for trailing pools."""
        return [
            [page for page, slots in enumerate(self.groups) if slots[number] is not None]
            for number in range(len(self.cache.pools))
        ]

    @property
    def slots(self) -> list[list[int]]:
        """For each pool, the slots of the pages that `indices` names."""
        return [
            [slot for slots in self.groups if (slot := slots[number]) is not None]
            for number in range(len(self.cache.pools))
        ]

    def close(self) -> bool:
        """Whether it was still open: each reservation ends once, whichever thread ends it."""
        with self._closing:
            was_open, self._open = self._open, False
        return was_open

    def abandon(self) -> None:
        """Give the slots back unfilled. Idempotent, and nothing after a commit."""
        if self.close():
            self.cache.free(self.groups)
