"""Find key spaces that nobody uses any more, and remove them with their pages."""

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
"""The beginning of 2020. No page can have been used earlier, because this program is younger."""
_LAST_TIME_S = 253_402_300_799.0
"""The end of the year 9999. A later time cannot be printed."""
_CLOCKS_APART_S = 5.0
"""How far a correct clock may be ahead of another clock, which may count only whole seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key space that may be removed."""

    usage: SpaceUsage
    used_at_s: float | None
    """No page was used after this time. None: the store was not asked."""

    def as_json(self) -> dict[str, Any]:
        """Return the key space and its last use."""
        used = None if self.used_at_s is None else format_time(self.used_at_s)
        return {**self.usage.as_json(), "used_at": used}


@dataclass(frozen=True, slots=True)
class Kept:
    """A key space that was selected for removal, but was not removed."""

    space_id: str
    reason: str
    """The reason in words, for example "it was used meanwhile"."""
    is_doubt: bool = False
    """True if the times of the key space are impossible, or its removal failed. Check it by hand."""


@dataclass(slots=True)
class Removal:
    """The result of a removal."""

    pages: int = 0
    """How many pages were removed."""
    kept: list[Kept] = field(default_factory=list[Kept])
    """The key spaces that were used after they had been chosen, or that could not be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions for removing a key space, apart from conditions on its fields."""

    used_before_s: float | None = None
    """Only key spaces that were last used before this time. None: the last use does not matter."""
    is_empty: bool = False
    """True: only key spaces that hold nothing, neither pages nor damaged pages."""

    def found(
        self, storage: HiCacheStorage, spaces: Sequence[KeySpace], meter: Meter
    ) -> Iterator[Candidate | Kept]:
        """Yield the key spaces to remove, and the key spaces for which that cannot be decided.

        Raises:
            UnsupportedOperation: The store does not record when pages are used.
        """
        for space in spaces:
            found = self.look(storage, space, meter)
            if isinstance(found, Candidate) or found.is_doubt:
                yield found

    def look(self, storage: HiCacheStorage, space: KeySpace, meter: Meter) -> Candidate | Kept:
        """Decide what to do with one key space."""
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
    """Remove the chosen key spaces from `storage`. Call `tell` with each id and its number of pages.

    `look` is the same store, for reading. Each key space is looked at again just before its removal, and
    kept if it was used meanwhile. If a key space cannot be removed, the other ones still are.
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
    """Remove a key space, or only its pages if the store does not list key spaces."""
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
    """Return the times of the pages that still exist."""
    found = [*zip(hashes, storage.page_times(space, hashes), strict=True)]
    unknown = [page_hash for page_hash, times in found if times.used_at_s is None]
    if unknown and any(storage.batch_exists(space, unknown)):
        raise UnsupportedOperation(
            "gc: the store does not record when its pages are used: select by model, revision,"
            " tenant or pool instead of --unused-for"
        )
    return [(page_hash, times) for page_hash, times in found if times.used_at_s is not None]


def _doubt(times: PageTimes) -> str:
    """Return what is impossible about the times of a page. Empty if they may be right."""
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
