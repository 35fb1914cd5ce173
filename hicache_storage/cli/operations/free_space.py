"""Find out how many bytes of pages a store takes before it loses others, for every verb that writes.

A verb takes at most half of what is free, because engines go on writing meanwhile, and because a page
takes more than its bytes.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage.cli.sizes import format_nbytes
from hicache_storage.cli.stores import EVICT, open_before_change
from hicache_storage.composition.parts import all_parts, undivided, undivided_configs
from hicache_storage.errors import ConfigError, NoSuchStore, StorageUnavailable, shown
from hicache_storage.page_store.frame import frame_nbytes
from hicache_storage.scalars import expand_home, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.config import StorageChoice
    from hicache_storage.storage import HiCacheStorage

_LEAST_PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Trial:
    """The number of pages to write, and their size."""

    pages: int
    page_nbytes: int

    def within(self, free_nbytes: float, alignment: int) -> Trial | None:
        """Return as much of the trial as fits: fewer pages, or one that is smaller. None: nothing fits.

        Examples:
            >>> Trial(8, 1 << 20).within(5 << 20, alignment=1)
            Trial(pages=2, page_nbytes=1048576)
        """
        page_nbytes = self.page_nbytes
        while stored_nbytes(page_nbytes, alignment) > free_nbytes / 2:
            if page_nbytes <= _LEAST_PAGE_NBYTES:
                return None
            page_nbytes = max(_LEAST_PAGE_NBYTES, page_nbytes // 2)
        if page_nbytes < self.page_nbytes:
            return Trial(1, page_nbytes)
        fitting = free_nbytes / 2 // stored_nbytes(page_nbytes, alignment)
        return Trial(int(min(self.pages, fitting)), page_nbytes)


def stored_nbytes(page_nbytes: int, alignment: int) -> int:
    """Return the bytes of a page with its frame, in a store that needs sizes of this alignment."""
    return frame_nbytes(alignment) + -(-page_nbytes // alignment) * alignment


def free_nbytes(
    choice: StorageChoice, storage: HiCacheStorage, tier: str | None = None
) -> dict[str, float]:
    """Return how many bytes of pages each store takes, by the name of its part.

    Infinite means that no limit is known. `storage` is the store of the choice, or its part `tier`.
    """
    found: dict[str, float] = {}
    for name, part in undivided(storage).items():
        fields = _fields(choice, tier, name)
        try:
            own = _own_limits(part)
        except StorageUnavailable as error:
            if not isinstance(error.__cause__, NoSuchStore):
                raise
            capacity = fields.get("capacity_nbytes")  # of the empty store that the caller makes
            own = [] if capacity is None else [parse_nbytes(capacity)]
        found[name] = max(0, min([math.inf, *own, *_file_system(fields)]))
    return found


@dataclass(frozen=True, slots=True)
class Shortage:
    """Stores that have less free space than a verb needs."""

    names: str
    """The names of the parts, several if they share a file system. "" is a store without parts."""
    free_nbytes: int
    needed_nbytes: int


def largest_shortage(
    choice: StorageChoice,
    storage: HiCacheStorage,
    needed: Mapping[str, int],
    tier: str | None = None,
) -> Shortage | None:
    """Return what lacks the most bytes if the parts take as many as `needed`. None: all fit.

    `needed` may name the whole store, as "", and parts that have parts. Each takes its share.
    """
    stores, needed_of = {"": storage, **all_parts(storage)}, Counter[str]()
    for name, nbytes in needed.items():
        for below, share in _shares(stores[name], 1.0, name).items():
            needed_of[below] += math.ceil(nbytes * share)
    shortages = [
        Shortage(", ".join(filter(None, names)), int(free), wanted)
        for names, free in _limits(choice, storage, tier)
        if (wanted := sum(needed_of[name] for name in names)) > free
    ]
    return max(shortages, key=lambda one: one.needed_nbytes - one.free_nbytes, default=None)


def _limits(
    choice: StorageChoice, storage: HiCacheStorage, tier: str | None
) -> list[tuple[list[str], float]]:
    """Return how many bytes stores take together, by their names: each of them, and each file system."""
    limits = [([name], free) for name, free in free_nbytes(choice, storage, tier).items()]
    on_device: dict[int, tuple[list[str], float]] = {}
    for (name,), _ in limits:
        path = _fields(choice, tier, name).get("path")
        with suppress(OSError):
            if isinstance(path, str):
                place = Path(expand_home(path))
                system = os.statvfs(place)
                free = system.f_bavail * system.f_frsize
                on_device.setdefault(place.stat().st_dev, ([], free))[0].append(name)
    return [*limits, *on_device.values()]


def _fields(choice: StorageChoice, tier: str | None, name: str) -> Mapping[str, object]:
    """Return the config of an undivided store by its name in the store, or in its part `tier`."""
    configs = undivided_configs(choice.backend, choice.config)
    return configs.get("/".join(filter(None, (tier, name))), ("", {}))[1]


def _shares(storage: HiCacheStorage, share: float = 1.0, name: str = "") -> dict[str, float]:
    """Return which share of the pages each undivided store gets, by the name of its part."""
    parts, found = storage.parts(), dict[str, float]()
    for own, of_part in storage.page_shares().items():
        found |= _shares(parts[own], share * of_part, f"{name}/{own}".lstrip("/"))
    return found or {name: share}


def require_free(
    verb: str, choice: StorageChoice, needed_nbytes: Callable[[int], int], advice: str
) -> None:
    """Refuse a verb whose pages could evict others. A store that holds nothing has nothing to lose.

    `needed_nbytes` returns the bytes that the verb writes to a store with some alignment.

    Raises:
        ConfigError: A store of the choice has too little free space, and the message says which.
    """
    with suppress(NoSuchStore), open_before_change(choice) as storage:
        needed = needed_nbytes(storage.capabilities.alignment)
        parts, shares = undivided(storage), _shares(storage)
        for name, free in free_nbytes(choice, storage).items():
            own = needed * shares[name]
            if own > free / 2 and _held_nbytes(parts[name]) != 0:
                raise ConfigError(
                    f"{verb}: {shown(name) or 'the store'} has {format_nbytes(int(free))} free, of"
                    f" which a run may take half, but this one may write {format_nbytes(int(own))}:"
                    f" {advice}, or accept with {EVICT} that it throws out up to so much of what is"
                    " stored there"
                )


def _own_limits(part: HiCacheStorage) -> list[float]:
    """Return what the store itself says about its free space."""
    found: list[float] = []
    for one in part.diagnose():
        if one.free_nbytes is not None:
            found.append(one.free_nbytes)
        elif one.is_full:
            found.append(0)
    capacity = part.stats().capacity_nbytes
    if capacity is not None:
        found.append(capacity - (_held_nbytes(part) or 0))
    return found


def _held_nbytes(part: HiCacheStorage) -> int | None:
    """Return the bytes in use. None: the store does not say, or shares its space with other programs."""
    stats = part.stats()
    if stats.nbytes is None and stats.capacity_nbytes is not None and part.capabilities.enumerable:
        return sum(info.nbytes for space in part.spaces() for info in part.scan(space))
    return stats.nbytes


def _file_system(fields: Mapping[str, object]) -> list[float]:
    """Return what is free on the file system of a store that has a path."""
    path = fields.get("path")
    with suppress(OSError):
        if isinstance(path, str):
            system = os.statvfs(expand_home(path))
            return [system.f_bavail * system.f_frsize]
    return []
