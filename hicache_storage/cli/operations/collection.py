"""Removal of key spaces that nobody uses any more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.cli.ages import format_time
from hicache_storage.cli.operations.batches import batches
from hicache_storage.cli.operations.listing import SpaceUsage
from hicache_storage.errors import UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.cli.progress import Meter
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageInfo

_PAGES_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Candidate:
    """A key space that may be removed."""

    usage: SpaceUsage
    used_at_s: float | None
    """The last use of any of its pages. None: the store was not asked, or there is no page."""

    def as_json(self) -> dict[str, Any]:
        """Return the key space and its last use."""
        used = None if self.used_at_s is None else format_time(self.used_at_s)
        return {**self.usage.as_json(), "used_at": used}


@dataclass(slots=True)
class Removal:
    """The result of a removal."""

    pages: int = 0
    """The pages that were removed."""
    kept: list[KeySpace] = field(default_factory=list["KeySpace"])
    """The key spaces that were used after they had been chosen."""


def candidates(
    storage: HiCacheStorage,
    spaces: Sequence[KeySpace],
    meter: Meter,
    *,
    used_before_s: float | None,
) -> Iterator[Candidate]:
    """Yield the key spaces that hold pages, of which none was used after `used_before_s`.

    Raises:
        UnsupportedOperation: The store does not know when a page was used.
    """
    for space in spaces:
        pages = nbytes = 0
        last_s: float | None = None
        for batch in _batches(storage, space):
            pages += len(batch)
            nbytes += sum(info.nbytes for info in batch)
            meter.advance(len(batch), 0)
            if used_before_s is not None:
                hashes = [info.page_hash for info in batch]
                last_s = max(last_s or 0.0, _last_use_s(storage, space, hashes))
                if last_s >= used_before_s:
                    break
        if pages and (used_before_s is None or (last_s is not None and last_s < used_before_s)):
            yield Candidate(SpaceUsage(space, pages, nbytes), last_s)


def remove(
    storage: HiCacheStorage,
    chosen: Sequence[Candidate],
    meter: Meter,
    *,
    used_before_s: float | None,
) -> Removal:
    """Remove the pages of the chosen key spaces.

    With `used_before_s` each key space is looked at again just before. One that was used meanwhile
    is kept.
    """
    removal = Removal()
    for candidate in chosen:
        space = candidate.usage.space
        if used_before_s is not None and _was_used(storage, space, meter, used_before_s):
            removal.kept.append(space)
            continue
        removal.pages += storage.clear(space)
    return removal


def _was_used(storage: HiCacheStorage, space: KeySpace, meter: Meter, after_s: float) -> bool:
    for batch in _batches(storage, space):
        meter.advance(len(batch), 0)
        if _last_use_s(storage, space, [info.page_hash for info in batch]) >= after_s:
            return True
    return False


def _batches(storage: HiCacheStorage, space: KeySpace) -> Iterator[list[PageInfo]]:
    most = storage.capabilities.max_batch or _PAGES_AT_ONCE
    return batches(storage.scan(space), min(_PAGES_AT_ONCE, most))


def _last_use_s(storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> float:
    """Return the last use of any of the pages that are still there; 0.0 if none is."""
    last_s, unknown = 0.0, list[str]()
    for page_hash, times in zip(hashes, storage.page_times(space, hashes), strict=True):
        if times.used_at_s is None:
            unknown.append(page_hash)
        else:
            last_s = max(last_s, times.used_at_s)
    if unknown and any(storage.batch_exists(space, unknown)):
        raise UnsupportedOperation(
            "gc: the store does not know when its pages were used: select by model, revision, tenant"
            " or pool instead of --unused-for"
        )
    return last_s
