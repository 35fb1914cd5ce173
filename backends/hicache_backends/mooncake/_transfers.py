"""Pages to and from the cluster: straight where their memory is registered, else through ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_backends.mooncake._client import sound
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.mooncake._client import Client

_STAGED_NBYTES = 64 << 20
"""What one call stages at most, unless one page is larger."""


class Transfers:
    """Reads and writes of whole batches. Thread-safe.

    Memory that the caller registered is the native client's for as long as a call takes, however long
    that is. Other memory is not: a call that is late could still write into it, or read what is there by
    then. It is copied from and to memory of our own, which a late call keeps.
    """

    def __init__(self, client: Client, timeout_s: float, *, register_staging: bool) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._register_staging = register_staging

    def read(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Fill the pages; True for each that came whole, with the length that it must have."""

        def get(native: Any, places: list[int], lent: list[Page]) -> list[int]:
            addresses, sizes = _lists(lent)
            names = [keys[place] for place in places]
            return sound(native.batch_get_into_multi_buffers(names, addresses, sizes))

        results = [False] * len(keys)
        firsts = _firsts(keys)
        for places, staged in self._parts(pages, sorted(set(firsts))):
            lent = staged or [pages[place] for place in places]
            codes = self._moved(get, places, lent, staged=bool(staged))
            for place, whole, code in zip(places, lent, codes, strict=True):
                results[place] = code == pages[place].nbytes
                if staged and results[place]:
                    pages[place].copy_from(whole.segments[0])
        for place, first in enumerate(firsts):
            if place != first and results[first]:
                pages[place].copy_from(pages[first].tobytes())
                results[place] = True
        return results

    def write(self, keys: Sequence[str], pages: Sequence[Page], replicas: Any) -> list[bool]:
        """Store the pages under keys that are not there; True for each that was."""

        def put(native: Any, places: list[int], lent: list[Page]) -> list[int]:
            addresses, sizes = _lists(lent)
            names = [keys[place] for place in places]
            return sound(native.batch_put_from_multi_buffers(names, addresses, sizes, replicas))

        results = [False] * len(keys)
        firsts = _firsts(keys)
        for places, staged in self._parts(pages, sorted(set(firsts))):
            for place, page in zip(places, staged, strict=False):
                _gather(pages[place], page.segments[0])
            lent = staged or [pages[place] for place in places]
            codes = self._moved(put, places, lent, staged=bool(staged))
            for place, code in zip(places, codes, strict=True):
                results[place] = code == 0
        return [results[first] for first in firsts]

    def _moved(
        self,
        move: Callable[[Any, list[int], list[Page]], list[int]],
        places: list[int],
        lent: list[Page],
        *,
        staged: bool,
    ) -> list[int]:
        start = lent[0].addresses[0][0] if staged and self._register_staging else None

        def task(native: Any) -> list[int]:
            if start is not None:
                native.register_buffer(start, sum(page.nbytes for page in lent))
            try:
                return move(native, places, lent)
            finally:
                if start is not None:
                    native.unregister_buffer(start)

        return self._client.ask(task, self._timeout_s, borrowed=not staged)

    def _parts(
        self, pages: Sequence[Page], wanted: Sequence[int]
    ) -> list[tuple[list[int], list[Page]]]:
        """Which pages go in one call, and the memory for those that cannot go straight."""
        straight: list[int] = []
        parts: list[tuple[list[int], list[Page]]] = []
        other: list[int] = []
        nbytes = 0
        for place in wanted:
            page = pages[place]
            if self._client.registered.holds(page.addresses):
                straight.append(place)
                continue
            if other and nbytes + page.nbytes > _STAGED_NBYTES:
                parts.append((other, []))
                other, nbytes = [], 0
            other.append(place)
            nbytes += page.nbytes
        parts += [(other, [])] if other else []
        staged = [(places, _staging([pages[place] for place in places])) for places, _ in parts]
        return [(straight, []), *staged] if straight else staged


def _firsts(keys: Sequence[str]) -> list[int]:
    """For each key where it stands first: the client fills one page only of those that share a key."""
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


def _lists(pages: Sequence[Page]) -> tuple[list[list[int]], list[list[int]]]:
    addresses = [[address for address, _ in page.addresses] for page in pages]
    sizes = [[nbytes for _, nbytes in page.addresses] for page in pages]
    return addresses, sizes
