"""Find out how full each store is, and which pages came and went between two looks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_storage.composition.parts import undivided
from hicache_storage.errors import StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from hicache_storage.cli.progress import Meter
    from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class Fill:
    """How much of its capacity a store uses."""

    name: str
    """The name of the tier or stripe. "" for a store without parts."""
    used_nbytes: int
    capacity_nbytes: int

    @property
    def share(self) -> float:
        """The used share of the capacity. It may be above 1."""
        return self.used_nbytes / self.capacity_nbytes

    def as_json(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "store": self.name,
            "used_nbytes": self.used_nbytes,
            "capacity_nbytes": self.capacity_nbytes,
        }


@dataclass(frozen=True, slots=True)
class StoreLook:
    """What one store holds at some time."""

    name: str
    """As in `Fill`."""
    pages: frozenset[bytes]
    """The key space and hash of each page."""
    nbytes: int
    fill: Fill | None
    """None: the store has no capacity, or does not say how much it uses."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a storage holds at some time, by the stores that it consists of."""

    at_s: float
    began_s: float
    """The same time on the monotonic clock."""
    stores: list[StoreLook]
    unreadable_spaces: int
    """How many key spaces cannot be read, so that their pages are not counted."""


def fills_of(storage: HiCacheStorage) -> list[Fill]:
    """Return how full each store is, as far as it has a capacity and says how much it uses."""
    fills = [_fill(name, part) for name, part in undivided(storage).items()]
    return [fill for fill in fills if fill is not None]


def look_at(storage: HiCacheStorage, meter: Meter) -> Look:
    """List all pages of a storage."""
    at_s, began_s = time.time(), time.monotonic()
    stores: list[StoreLook] = []
    for name, part in undivided(storage).items():
        pages, nbytes = set[bytes](), 0
        try:
            for space in part.spaces():
                space_id = bytes.fromhex(space.id)
                for info in part.scan(space):
                    pages.add(space_id + bytes.fromhex(info.page_hash))
                    nbytes += info.nbytes
                    meter.advance(1, 0)
            fill = _fill(name, part)
        except (StorageUnavailable, StorageTimeout) as error:
            raise type(error)(f"{name}: {error}" if name else str(error)) from error
        stores.append(StoreLook(name, frozenset(pages), nbytes, fill))
    return Look(at_s, began_s, stores, sum(1 for _ in storage.unreadable_spaces()))


def figures(look: Look, before: Look | None) -> list[dict[str, Any]]:
    """Return the figures of each store, with what changed since an earlier look."""
    earlier = {one.name: one for one in before.stores} if before is not None else {}
    elapsed_s = max(look.began_s - before.began_s, 1e-3) if before is not None else 0.0
    found: list[dict[str, Any]] = []
    for one in look.stores:
        row: dict[str, Any] = {
            "store": one.name,
            "pages": len(one.pages),
            "nbytes": one.nbytes,
            "used_nbytes": None if one.fill is None else one.fill.used_nbytes,
            "capacity_nbytes": None if one.fill is None else one.fill.capacity_nbytes,
        }
        if (old := earlier.get(one.name)) is not None:
            row["elapsed_s"] = elapsed_s
            row["new_pages"] = len(one.pages - old.pages)
            row["gone_pages"] = len(old.pages - one.pages)
        found.append(row)
    return found


def _fill(name: str, part: HiCacheStorage) -> Fill | None:
    stats = part.stats()
    if stats.nbytes is None or not stats.capacity_nbytes:
        return None
    return Fill(name, stats.nbytes, stats.capacity_nbytes)
