"""Pages of L2 in the hands of a request: a usable prefix, or room for new pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from hicache_storage.controller.host_cache import Entry, HostCache, Slots


@dataclass(slots=True, eq=False)
class Lease:
    """The usable prefix of a request, pinned in L2 until `release`. A context manager."""

    cache: HostCache
    entries: list[Entry]
    loaded: list[int]
    """Indices of the pages that came from L3 for this request."""
    _held: bool = field(default=True, init=False)

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
    def slots(self) -> list[list[int]]:
        """For each pool, the slot of each page."""
        return _by_pool(self.cache, [entry.slots for entry in self.entries])

    def release(self) -> None:
        """Unpin the pages; their slots are not the request's any more. Idempotent."""
        if self._held:
            self._held = False
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
    groups: list[Slots]
    _open: bool = field(default=True, init=False)

    @property
    def pages(self) -> int:
        """How many pages there is room for: a leading part of what was asked."""
        return len(self.groups)

    @property
    def slots(self) -> list[list[int]]:
        """For each pool, the slot of each page."""
        return _by_pool(self.cache, self.groups)

    def close(self) -> bool:
        """Whether it was still open: each reservation ends once."""
        was_open, self._open = self._open, False
        return was_open

    def abandon(self) -> None:
        """Give the slots back unfilled. Idempotent, and nothing after a commit."""
        if self.close():
            self.cache.free(self.groups)


def _by_pool(cache: HostCache, groups: list[Slots]) -> list[list[int]]:
    return [[group[number] for group in groups] for number in range(len(cache.pools))]
