"""Find key spaces that nobody uses any more, and remove them with their pages."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.ages import format_time
from hicache_storage.cli.operations.batches import listed
from hicache_storage.cli.operations.selection import SpaceUsage
from hicache_storage.errors import HiCacheError, StorageUnavailable, UnsupportedOperation
from hicache_storage.scalars import counted
from hicache_storage.storage import UnreadableKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageTimes, UnreadableSpace

_FIRST_USE_S = 1_577_836_800.0
"""The beginning of 2020. No page can have been used earlier, because this program is younger."""
_CLOCKS_APART_S = 5.0
"""How far a correct clock may be ahead of another clock, which may count only whole seconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key space that may be removed."""

    usage: SpaceUsage
    used_at_s: float | None = None
    """No page was used after this time. None: the store was not asked."""
    written_at_s: float | None = None
    """No page was written after this time. None: the store was not asked."""

    def as_json(self) -> dict[str, Any]:
        """Return the key space and its last use and write."""
        times = {"used_at": self.used_at_s, "written_at": self.written_at_s}
        shown = {name: None if at_s is None else format_time(at_s) for name, at_s in times.items()}
        return {**self.usage.as_json(), **shown}


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

    spaces: int = 0
    """How many key spaces were removed."""
    pages: int = 0
    """How many pages are gone, also of key spaces whose removal did not end."""
    kept: list[Kept] = field(default_factory=list[Kept])
    """The key spaces that were used after they had been chosen, or that could not be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions for removing a key space, apart from conditions on its fields."""

    used_before_s: float | None = None
    """Only key spaces that were last used before this time. None: the last use does not matter."""
    written_before_s: float | None = None
    """Only key spaces in which no page was written since this time. None: writes do not matter."""
    is_empty: bool = False
    """True: only key spaces that hold nothing, neither pages nor damaged pages."""

    def found(
        self, storage: HiCacheStorage, spaces: Sequence[KeySpace], meter: Meter
    ) -> Iterator[Candidate | Kept]:
        """Yield the key spaces to remove, and the key spaces for which that cannot be decided.

        Raises:
            UnsupportedOperation: The store does not record when pages are used, or written.
        """
        for space in spaces:
            found = self.look(storage, space, meter)
            if isinstance(found, Candidate) or found.is_doubt:
                yield found

    def look(self, storage: HiCacheStorage, space: KeySpace, meter: Meter) -> Candidate | Kept:
        """Decide what to do with one key space."""
        pages = nbytes = 0
        last: dict[_Act, float] = {}
        limits = self._limits()
        for batch in listed(storage, space):
            if self.is_empty:
                return Kept(space.id, "it holds pages")
            pages += len(batch)
            nbytes += sum(info.nbytes for info in batch)
            meter.advance(len(batch), 0)
            hashes = [info.page_hash for info in batch]
            for act, page_hash, times in _times(storage, space, hashes, limits):
                if doubt := act.doubt(times):
                    return Kept(space.id, f"its page {page_hash} {doubt}", is_doubt=True)
                last[act] = max(last.get(act, 0.0), act.latest_s(times) or 0.0)
            for act, at_s in last.items():
                if at_s >= limits[act]:
                    return Kept(space.id, f"it was {act.done} meanwhile")
        if limits and not last:
            return Kept(space.id, "it holds no pages")
        if self.is_empty and any(True for _ in storage.faults(space)):
            return Kept(space.id, "it holds damaged pages")
        return Candidate(SpaceUsage(space, pages, nbytes), last.get(_USE), last.get(_WRITE))

    def _limits(self) -> dict[_Act, float]:
        limits = {_USE: self.used_before_s, _WRITE: self.written_before_s}
        return {act: before_s for act, before_s in limits.items() if before_s is not None}


def removable(
    look: HiCacheStorage, unreadable: Sequence[UnreadableSpace]
) -> tuple[list[UnreadableSpace], list[Kept]]:
    """Divide key spaces that cannot be read: those that may be removed, and those that are kept.

    A key space that the store could not look at may be right, in any part of a composition.
    """
    chosen = {one.space_id: one for one in unreadable}
    kept = {
        one.space_id: Kept(one.space_id, f"{one.reason}, so it may be right", is_doubt=True)
        for one in unreadable
        if one.kind is UnreadableKind.NOT_READ
    }
    for space in look.spaces() if chosen and look.parts() else ():
        if space.id in chosen:
            reason = "but other tiers can read it: use --tier to remove it there alone"
            reason = f"{chosen[space.id].reason}, {reason}"
            kept.setdefault(space.id, Kept(space.id, reason, is_doubt=True))
    return [one for one in chosen.values() if one.space_id not in kept], [*kept.values()]


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
    kept if it was used meanwhile. So are all those that could not be read, before the first of them is
    removed. If a key space cannot be removed, the other ones still are.
    """
    unreadable: set[str] | None = None
    reasons: dict[str, Kept] = {}
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
            if unreadable is None:
                found, kept = removable(look, [*look.unreadable_spaces()])
                unreadable = {each.space_id for each in found}
                reasons = {each.space_id: each for each in kept}
            if space_id not in unreadable:
                changed = Kept(space_id, "it was mended or removed meanwhile", is_doubt=True)
                removal.kept.append(reasons.get(space_id, changed))
                continue
        try:
            pages = _remove(storage, space_id, space)
        except BaseException as error:
            what = str(error) if isinstance(error, HiCacheError) else "its removal was interrupted"
            removal.kept.append(Kept(space_id, f"{what}; some pages may be gone", is_doubt=True))
            if isinstance(one, Candidate):
                _count_left(look, one.usage, what, removal)
            if not isinstance(error, StorageUnavailable):
                raise
            continue
        removal.spaces += 1
        removal.pages += pages
        tell(space_id, pages)


def _count_left(look: HiCacheStorage, usage: SpaceUsage, what: str, removal: Removal) -> None:
    """Count which pages of a key space are gone, although its removal did not end."""
    with suppress(HiCacheError):
        left = sum(len(batch) for batch in listed(look, usage.space))
        removal.pages += max(0, (usage.pages or 0) - left)
        reason = f"{what}; {left:,} of {counted(usage.pages or 0, 'page')} are left"
        removal.kept[-1] = Kept(usage.space.id, reason, is_doubt=True)


def _remove(storage: HiCacheStorage, space_id: str, space: KeySpace | None) -> int:
    """Remove a key space, or only its pages if the store does not list key spaces."""
    try:
        return storage.remove_space(space_id)
    except UnsupportedOperation:
        if space is None:
            raise
        storage.open_space(space)
        return storage.clear(space)


@dataclass(frozen=True, slots=True)
class _Act:
    """What has a time: the use of a page, or its write."""

    done: str
    recorded: str
    flag: str

    def latest_s(self, times: PageTimes) -> float | None:
        """Return the latest time at which this can have been done to a page. None: not recorded."""
        if self is _WRITE and times.written_at_s is not None:
            return times.written_at_s
        if times.used_at_s is None:
            return None
        # A write is a use. So a page was not written after its last use.
        return times.used_at_s + (times.used_within_s if self is _USE else 0.0)

    def doubt(self, times: PageTimes) -> str:
        """Return what is impossible about the times of a page. Empty if they may be right."""
        used_s, written_s = times.used_at_s, times.written_at_s
        if self is _WRITE and written_s is not None:
            return _doubt("written", written_s)
        if used_s is None:
            return ""
        if doubt := _doubt("used", used_s):
            return doubt
        if written_s is not None and written_s > used_s + times.used_within_s + _CLOCKS_APART_S:
            return (
                f"was used at {format_time(used_s)} according to the store, before it was written"
                f" at {format_time(written_s)}"
            )
        return ""


_USE = _Act("used", "used", "--unused-for")
_WRITE = _Act("written to", "written", "--older-than")


def _times(
    storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str], limits: Collection[_Act]
) -> Iterator[tuple[_Act, str, PageTimes]]:
    """Yield the times of the pages that still exist, for each limit on a time."""
    found = [*zip(hashes, storage.page_times(space, hashes), strict=True)] if limits else []
    for act in limits:
        unknown = [page_hash for page_hash, times in found if act.latest_s(times) is None]
        if unknown and any(storage.batch_exists(space, unknown)):
            subject, choose = "the store does not record", ""
            if storage.parts():
                subject, choose = (
                    "a tier or stripe does not record",
                    "choose another one with --tier, or ",
                )
            raise UnsupportedOperation(
                f"gc: {subject} when its pages are {act.recorded}: {choose}select by model, revision,"
                f" tenant or pool instead of {act.flag}"
            )
        for page_hash, times in found:
            if act.latest_s(times) is not None:
                yield act, page_hash, times


def _doubt(done: str, at_s: float) -> str:
    if at_s < _FIRST_USE_S:
        return f"was {done} at {format_time(at_s)} according to the store, which cannot be true"
    if at_s > time.time() + _CLOCKS_APART_S:
        return f"was {done} in the future according to the store, at {format_time(at_s)}"
    return ""
