"""Pages to and from the cluster: straight where their memory is registered, else through ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from hicache_backends.mooncake.client import sound
from hicache_backends.mooncake.unfinished import not_there
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.mooncake.client import Client
    from hicache_storage.backend_support.deadline import Deadline

T = TypeVar("T")
Move: TypeAlias = "Callable[[Any, Sequence[str], Sequence[Page]], list[int]]"

_STAGED_NBYTES = 64 << 20
"""What one call stages at most, unless one page is larger."""


class Transfers:
    """Reads and writes of whole batches. Thread-safe.

    Memory that the caller registered is the native client's for as long as a call takes, however long
    that is. Other memory is not: a call that is late could still write into it, or read what is there by
    then. It is copied from and to memory of our own, which a late call keeps.
    """

    def __init__(self, client: Client, *, register_staging: bool) -> None:
        self._client = client
        self._register_staging = register_staging

    def read(self, keys: Sequence[str], pages: Sequence[Page], deadline: Deadline) -> list[bool]:
        """Fill the pages; True for each that came whole, with the length that it must have."""
        results = [False] * len(keys)
        firsts = _firsts(keys)
        for places, staged in self._parts(pages, sorted(set(firsts))):
            lent = staged or _chosen(pages, places)
            codes = self._moved(_get, _chosen(keys, places), lent, deadline, staged=bool(staged))
            for place, whole, code in zip(places, lent, codes, strict=True):
                results[place] = code == whole.nbytes
                if staged and results[place]:
                    pages[place].copy_from(whole.segments[0])
        for place, first in enumerate(firsts):
            if place != first and results[first]:
                pages[place].copy_from(pages[first].tobytes())
                results[place] = True
        return results

    def write(
        self, keys: Sequence[str], pages: Sequence[Page], replicas: Any, deadline: Deadline
    ) -> list[bool]:
        """Store the pages under keys that are not there; True for each that was."""
        put = _Put(replicas)
        results = [False] * len(keys)
        firsts = _firsts(keys)
        for places, staged in self._parts(pages, sorted(set(firsts))):
            for place, page in zip(places, staged, strict=False):
                _gather(pages[place], page.segments[0])
            lent = staged or _chosen(pages, places)
            codes = self._moved(put, _chosen(keys, places), lent, deadline, staged=bool(staged))
            for place, code in zip(places, codes, strict=True):
                results[place] = code == 0
        return [results[first] for first in firsts]

    def _moved(
        self,
        move: Move,
        keys: Sequence[str],
        lent: Sequence[Page],
        deadline: Deadline,
        *,
        staged: bool,
    ) -> list[int]:
        start = lent[0].addresses[0][0] if staged and self._register_staging else None

        def task(native: Any) -> list[int]:
            if start is not None:
                native.register_buffer(start, sum(page.nbytes for page in lent))
            try:
                return move(native, keys, lent)
            finally:
                if start is not None:
                    native.unregister_buffer(start)

        return self._client.ask(task, deadline, borrowed=not staged)

    def _parts(
        self, pages: Sequence[Page], wanted: Sequence[int]
    ) -> list[tuple[Sequence[int], list[Page]]]:
        """Which pages go in one call, and the memory for those that cannot go straight."""
        outside = self._client.registered.outside(pages, wanted)
        if not outside:
            return [(wanted, [])]
        left = set(outside)
        straight = [place for place in wanted if place not in left]
        parts: list[list[int]] = [[]]
        nbytes = 0
        for place in outside:
            if parts[-1] and nbytes + pages[place].nbytes > _STAGED_NBYTES:
                parts.append([])
                nbytes = 0
            parts[-1].append(place)
            nbytes += pages[place].nbytes
        staged = [(part, _staging([pages[place] for place in part])) for part in parts]
        return [(straight, []), *staged] if straight else [*staged]


def _get(native: Any, keys: Sequence[str], pages: Sequence[Page]) -> list[int]:
    if _are_of_one_segment(pages):
        return sound(native.batch_get_into(keys, *_places(pages)))
    return sound(native.batch_get_into_multi_buffers(keys, *_lists(pages)))


class _Put:
    """Puts of one call, which are made again where the master was lost in the middle."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas
        self._begun: set[str] = set()

    def __call__(self, native: Any, keys: Sequence[str], pages: Sequence[Page]) -> list[int]:
        again = not self._begun.isdisjoint(keys)
        self._begun.update(keys)
        if _are_of_one_segment(pages):
            codes = sound(native.batch_put_from(keys, *_places(pages), self._replicas))
        else:
            codes = sound(native.batch_put_from_multi_buffers(keys, *_lists(pages), self._replicas))
        if again and not_there(native, keys):
            raise StorageUnavailable(
                "mooncake: the master was lost in the middle of a set: what it stored is not known"
            )
        return codes


def _chosen(items: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    return items if len(places) == len(items) else [items[place] for place in places]


def _firsts(keys: Sequence[str]) -> Sequence[int]:
    """For each key where it stands first: the client fills one page only of those that share a key."""
    if len(set(keys)) == len(keys):
        return range(len(keys))
    seen: dict[str, int] = {}
    return [seen.setdefault(key, place) for place, key in enumerate(keys)]


def _staging(pages: list[Page]) -> list[Page]:
    room = np.empty(sum(page.nbytes for page in pages), np.uint8).data
    found: list[Page] = []
    start = 0
    for page in pages:
        found.append(Page(room[start : start + page.nbytes]))
        start += page.nbytes
    return found


def _gather(source: Page, target: memoryview) -> None:
    start = 0
    for segment in source.segments:
        target[start : start + segment.nbytes] = segment
        start += segment.nbytes


def _are_of_one_segment(pages: Sequence[Page]) -> bool:
    return all([len(page.segments) == 1 for page in pages])  # noqa: C419 - twice as fast as a generator


def _places(pages: Sequence[Page]) -> tuple[list[int], list[int]]:
    return [page.addresses[0][0] for page in pages], [page.nbytes for page in pages]


def _lists(pages: Sequence[Page]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in page.addresses] for page in pages]
    sizes = [[nbytes for _, nbytes in page.addresses] for page in pages]
    return addresses, sizes
