"""Pages of L2 in the hands of a request: a usable prefix, or room for new pages."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hicache_storage.controller.coverage import Coverage, coverage, verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.host_cache import HostCache
    from hicache_storage.controller.pool_set import Bits, PageSlots


class Lease:
    """The usable prefix of a request, pinned in L2 until `release`. A context manager.

    It tells what was there when it was taken; a slot is told only where it holds its page.
    """

    def __init__(
        self,
        cache: HostCache,
        entries: list[Entry],
        loaded: list[int],
        filled: Sequence[Bits],
        *,
        known: Sequence[Bits],
        consider: Callable[[Sequence[Entry]], None],
    ) -> None:
        self.cache = cache
        self.entries = entries
        self.loaded = loaded
        """Indices of the pages that came from L3 for this request, in any pool."""
        self._filled = filled
        self._known = known
        self._consider = consider
        self._claims: dict[int, dict[int, Entry]] = {}
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
        return coverage(self.cache.pool_set, self._filled, self.pages, self._known)

    @property
    def verdict(self) -> Coverage:
        """Of the prefix: BOTH, TARGET_ONLY where `missing` has pages, NONE where it is empty."""
        return verdict(self.coverage[: self.pages])

    @property
    def target_only_pages(self) -> int:
        """Pages of the prefix that the draft lacks."""
        everything = self.cache.pool_set.everything
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
        number = self.cache.pool_set.number(pool)
        needed = self.cache.pool_set.needed
        return [
            page
            for page, bits in enumerate(self._filled)
            if needed(page, self.pages) & ~bits & 1 << number
        ]

    def claim(self, pool: str) -> dict[int, int]:
        """The missing pages of a pool that this request may compute, each with the slot to write it to.

        Not those that another request is filling, and none after `release`. Idempotent.

        Raises:
            ValueError: There is no such pool.
        """
        number = self.cache.pool_set.number(pool)
        with self._lock:
            claims = self._claims.setdefault(number, {})
            for page in self.missing(pool) if self._held else ():
                entry = self.entries[page]
                if page not in claims and self.cache.claim(entry, 1 << number):
                    claims[page] = entry
            return {
                page: slot
                for page, entry in claims.items()
                if (slot := entry.slots[number]) is not None
            }

    def fill(self, pool: str, pages: Iterable[int]) -> None:
        """Claimed pages of a pool are written: they are L2's from now on, and L3's by write policy.

        Raises:
            ValueError: A page was not claimed, or the lease was released. None is filled then.
        """
        number = self.cache.pool_set.number(pool)
        chosen = list(pages)
        with self._lock:
            claims = self._claims.get(number, {})
            for page in chosen:
                if page not in claims:
                    raise ValueError(f"page {page} of pool {pool!r} is not claimed by this lease")
            filled = [claims.pop(page) for page in chosen]
            for entry in filled:
                self.cache.fill(entry, 1 << number)
            self._consider(filled)

    def release(self) -> None:
        """Unpin the pages; their slots are not the request's any more. Idempotent."""
        with self._lock:
            was_held, self._held = self._held, False
            claims, self._claims = self._claims, {}
        if was_held:
            for number, entries in claims.items():
                for entry in entries.values():
                    self.cache.unclaim(entry, 1 << number)
            self.cache.unpin(self.entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots for pages that a request is about to fill: then `commit` it, or `abandon` it."""

    cache: HostCache
    hashes: list[str]
    groups: list[PageSlots]
    _open: bool = field(default=True, init=False)

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
        """Whether it was still open: each reservation ends once."""
        was_open, self._open = self._open, False
        return was_open

    def abandon(self) -> None:
        """Give the slots back unfilled. Idempotent, and nothing after a commit."""
        if self.close():
            self.cache.free(self.groups)
