"""Key spaces with their pages, and the removal of those that nobody uses any more."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.ages import format_time
from hicache_storage.cli.operations.batches import listed
from hicache_storage.cli.operations.selection import SpaceUsage
from hicache_storage.errors import StorageUnavailable, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageTimes, UnreadableSpace

_FIRST_USE_S = 1_577_836_800.0
"""The begin of 2020, before which no page can have been used: this program is younger."""
_LAST_TIME_S = 253_402_300_799.0
"""The end of the year 9999, beyond which no time can be printed."""
_CLOCKS_APART_S = 5.0
"""The time by which a right clock may be ahead of another one, or of one that counts in seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key space that may be removed."""

    usage: SpaceUsage
    used_at_s: float | None
    """The time after which none of its pages was used. None: the store was not asked."""

    def as_json(self) -> dict[str, Any]:
        """Return the key space and its last use."""
        used = None if self.used_at_s is None else format_time(self.used_at_s)
        return {**self.usage.as_json(), "used_at": used}


@dataclass(frozen=True, slots=True)
class Kept:
    """A key space that stays, although it was asked for."""

    space_id: str
    reason: str
    """The reason for people: "it was used meanwhile"."""
    is_doubt: bool = False
    """True if somebody has to look: its times are impossible, or it could not be removed."""


@dataclass(slots=True)
class Removal:
    """The result of a removal."""

    pages: int = 0
    """The pages that were removed."""
    kept: list[Kept] = field(default_factory=list[Kept])
    """The key spaces that were used after they had been chosen, or that could not be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions beside its fields on which a key space goes."""

    used_before_s: float | None = None
    """None: whenever it was used."""
    is_empty: bool = False
    """True: only key spaces that hold nothing, neither pages nor damaged ones."""

    def found(
        self, storage: HiCacheStorage, spaces: Sequence[KeySpace], meter: Meter
    ) -> Iterator[Candidate | Kept]:
        """Yield the key spaces to remove, and those of which that cannot be known.

        Raises:
            UnsupportedOperation: The store does not know when a page was used.
        """
        for space in spaces:
            found = self.look(storage, space, meter)
            if isinstance(found, Candidate) or found.is_doubt:
                yield found

    def look(self, storage: HiCacheStorage, space: KeySpace, meter: Meter) -> Candidate | Kept:
        """Return what becomes of one key space."""
        pages = nbytes = 0
        last_s: float | None = None
        for batch in listed(storage, space):
            if self.is_empty:
                return Kept(space.id, "it holds pages")
            pages += len(batch)
            nbytes += sum(info.nbytes for info in batch)
            meter.advance(len(batch), 0)
            if self.used_before_s is None:
                continue
            for page_hash, times in _uses(storage, space, [info.page_hash for info in batch]):
                if doubt := _doubt(times):
                    return Kept(space.id, f"its page {page_hash} {doubt}", is_doubt=True)
                last_s = max(last_s or 0.0, (times.used_at_s or 0.0) + times.used_within_s)
            if last_s is not None and last_s >= self.used_before_s:
                return Kept(space.id, "it was used meanwhile")
        if self.used_before_s is not None and last_s is None:
            return Kept(space.id, "it holds no pages")
        if self.is_empty and any(True for _ in storage.faults(space)):
            return Kept(space.id, "it holds damaged pages")
        return Candidate(SpaceUsage(space, pages, nbytes), last_s)


def remove(
    look: HiCacheStorage,
    storage: HiCacheStorage,
    chosen: Sequence[Candidate | UnreadableSpace],
    wanted: Wanted,
    removal: Removal,
    *,
    meter: Meter,
    tell: Callable[[str, int], None],
) -> None:
    """Remove the chosen key spaces from `storage`, and tell of each one with the number of its pages.

    `look` sees the same store. Each key space is looked at again just before. One that was used
    meanwhile is kept. One that cannot be removed does not keep the others.
    """
    for one in chosen:
        if isinstance(one, Candidate):
            space = one.usage.space
            again = one if wanted == Wanted() else wanted.look(look, space, meter)
            if isinstance(again, Kept):
                removal.kept.append(again)
                continue
            space_id = space.id
        else:
            space, space_id = None, one.space_id
        try:
            pages = _remove(storage, space_id, space)
        except StorageUnavailable as error:
            removal.kept.append(Kept(space_id, str(error), is_doubt=True))
            continue
        removal.pages += pages
        tell(space_id, pages)


def _remove(storage: HiCacheStorage, space_id: str, space: KeySpace | None) -> int:
    """Remove a key space, or the pages alone where a store keeps no list of key spaces."""
    try:
        return storage.remove_space(space_id)
    except UnsupportedOperation:
        if space is None:
            raise
        storage.open_space(space)
        return storage.clear(space)


def _uses(
    storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]
) -> list[tuple[str, PageTimes]]:
    """Return the times of the pages that are still there."""
    found = [*zip(hashes, storage.page_times(space, hashes), strict=True)]
    unknown = [page_hash for page_hash, times in found if times.used_at_s is None]
    if unknown and any(storage.batch_exists(space, unknown)):
        raise UnsupportedOperation(
            "gc: the store does not record when its pages are used: select by model, revision,"
            " tenant or pool instead of --unused-for"
        )
    return [(page_hash, times) for page_hash, times in found if times.used_at_s is not None]


def _doubt(times: PageTimes) -> str:
    """Return what is impossible in the times of a page; nothing if they may be right."""
    used_s = times.used_at_s or 0.0
    if used_s < _FIRST_USE_S:
        return f"was used at {_format(used_s)} according to the store, which cannot be true"
    if used_s > time.time() + _CLOCKS_APART_S:
        return f"was used in the future according to the store, at {_format(used_s)}"
    written_s = times.written_at_s
    if written_s is not None and written_s > used_s + times.used_within_s + _CLOCKS_APART_S:
        return (
            f"was used at {_format(used_s)} according to the store, before it was written"
            f" at {_format(written_s)}"
        )
    return ""


def _format(at_s: float) -> str:
    return format_time(min(max(at_s, 0.0), _LAST_TIME_S))
