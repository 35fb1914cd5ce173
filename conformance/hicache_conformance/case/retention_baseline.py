"""The retention baseline: whether a store forgets or refuses pages for no reason.

The kit measures the baseline with pages of its own. So a check can tell it from a fault that shows
only in the situation of the check.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any, Protocol

from hicache_conformance.case.probe import Probe, Trace
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.run.subject import Scratch, Subject
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import Capabilities, HiCacheStorage

TENANT = "forgetfulness"
"""The tenant of the key spaces with these pages."""
_CHANCES = 48
"""How many pages are set and read to find a store that forgets one in ten."""
_REFUSAL_CHANCES = 12
_MOST_LOOKED_UP = 3000
_IN_USE = 16
"""How many pages are looked up again and again."""
_LONGEST_WAIT_S = 3.0
_LOOKUP = 256


class RunningCase(Protocol):
    """The part of a `Case` that a baseline uses."""

    subject: Subject
    trace: Trace
    changed_fields: dict[str, Any]

    @property
    def absent(self) -> Mapping[str, str]: ...
    @property
    def claims(self) -> Capabilities: ...
    @property
    def elapsed_s(self) -> float: ...
    def new_scratch(self) -> Scratch: ...
    def open_storage(self, config: Mapping[str, Any] | None = None) -> HiCacheStorage: ...
    def space(self, page_nbytes: int = 1024, **changes: Any) -> KeySpace: ...
    def hashes(self, count: int) -> list[str]: ...
    def contents(self, space: KeySpace, hashes: Sequence[str]) -> dict[str, bytes]: ...


def forgets(case: RunningCase, probe: Probe) -> bool:
    """Return True if the store forgets pages for no reason.

    The baseline sets and reads as many pages as the check has set, because the store may be full.
    If the store may forget at any time, the baseline also tests whether it does so by chance, after
    many lookups, or after some time.
    """
    pages = _Pages(case, probe)
    try:
        if pages.lost_for_room():
            return True
        if case.claims.retention is not Retention.BEST_EFFORT:
            return False
        return pages.lost_by_chance() or pages.lost_by_use() or pages.lost_with_age()
    finally:
        pages.delete()


def refuses(case: RunningCase, nbytes: int) -> bool:
    """Return True if a fresh store refuses pages like those of the check, or some pages of `nbytes`.

    Some stores have little room, and some refuse a set now and then.
    """
    fresh = copy.copy(case.subject).config(case.new_scratch())
    storage = case.open_storage({**fresh, **case.changed_fields})
    pages = _Pages(case, Probe(storage, Trace(), absent=case.absent))
    try:
        if not all(pages.set(size) for size in [*case.trace.footprint, nbytes]):
            return True
        return not all(pages.set(nbytes, brief=True) for _ in range(_REFUSAL_CHANCES))
    finally:
        pages.delete()
        storage.close()


class _Pages:
    """The pages that the baseline itself sets, in the check's store or in another one."""

    def __init__(self, case: RunningCase, probe: Probe) -> None:
        self._case = case
        self._probe = Probe(
            probe.storage, Trace(), probe.label, absent=probe.absent
        )  # a trace of its own
        self._spaces: dict[int, KeySpace] = {}
        self._set: list[tuple[KeySpace, str, bytes]] = []

    def set(self, nbytes: int, *, brief: bool = False) -> bool:
        """Set one more page, and delete it at once if `brief`. Return True if it was accepted."""
        case = self._case
        if nbytes not in self._spaces:
            self._spaces[nbytes] = case.space(nbytes, tenant=TENANT)
            self._probe.open_space(self._spaces[nbytes])
        space = self._spaces[nbytes]
        ((page_hash, data),) = case.contents(space, case.hashes(1)).items()
        taken = self._probe.set(space, {page_hash: data}) == [True]
        if brief and "batch_delete" not in self._probe.absent:
            self._probe.delete(space, [page_hash])
        elif taken:
            self._set.append((space, page_hash, data))
        return taken

    def delete(self) -> None:
        """Delete all these pages if the store can delete pages."""
        if "batch_delete" in self._probe.absent:
            self._set.clear()
            return
        for space in self._spaces.values():
            self._probe.delete(space, [h for home, h, _ in self._set if home is space])
        self._set.clear()

    def lost_for_room(self) -> bool:
        sizes = self._case.trace.footprint
        done = 0
        while done < len(sizes):  # a small store shows early that it is full
            step = sizes[done : max(16, 4 * done)]
            for nbytes in step:
                self.set(nbytes)
            done += len(step)
            if self._lost():
                return True
        return False

    def lost_by_chance(self) -> bool:
        nbytes = self._smallest()
        for _ in range(_CHANCES):
            self.delete()
            self.set(nbytes)
            if self._lost():
                return True
        return False

    def lost_by_use(self) -> bool:
        """Return True if a page disappears after as many lookups as the check has made."""
        self.delete()
        nbytes = self._smallest()
        for _ in self._case.trace.footprint[:_IN_USE]:
            self.set(nbytes)
        hashes = [page_hash for _, page_hash, _ in self._set]
        left = min(self._case.trace.pages_named, _MOST_LOOKED_UP) if hashes else 0
        until_s = time.monotonic() + _LONGEST_WAIT_S
        while left > 0 and time.monotonic() < until_s:
            there = self._probe.exists(self._spaces[nbytes], hashes)
            if not all(there) or None in self._probe.get(self._spaces[nbytes], hashes):
                return True
            left -= 2 * len(hashes)
        return False

    def lost_with_age(self) -> bool:
        self.delete()
        nbytes = self._smallest()
        self.set(nbytes)
        until_s = time.monotonic() + min(self._case.elapsed_s, _LONGEST_WAIT_S)
        left = min(self._case.trace.pages_named, _MOST_LOOKED_UP)
        while left > 0:
            absent = self._case.hashes(min(left, _LOOKUP))
            self._probe.exists(self._spaces[nbytes], absent)
            self._probe.get(self._spaces[nbytes], absent)
            left -= len(absent)
        time.sleep(max(0.0, until_s - time.monotonic()))
        return self._lost()

    def _lost(self) -> bool:
        return any(self._probe.get(space, [h]) != [data] for space, h, data in self._set)

    def _smallest(self) -> int:
        sizes: Sequence[int] = self._case.trace.footprint
        return min(sizes, default=1)
