"""Host memory that is registered with a native client, and what lies outside it."""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.page import Page


class Registered:
    """Address ranges, none overlapping another, each with its number of users. Thread-safe.

    The client library refuses what overlaps, and what it has already: storages that share a client
    register the same host pool.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._users: dict[int, int] = {}

    def add(self, start: int, nbytes: int, register: Callable[[int, int], int]) -> bool:
        """Have `register` take a range, unless it is there; False where it overlaps or is refused."""
        with self._lock:
            place = bisect.bisect_left(self._starts, start)
            if place < len(self._starts) and self._starts[place] == start:
                if self._ends[place] != start + nbytes:
                    return False
                self._users[start] += 1
                return True
            if self._overlaps(place, start, nbytes) or register(start, nbytes) != 0:
                return False
            self._starts.insert(place, start)
            self._ends.insert(place, start + nbytes)
            self._users[start] = 1
            return True

    def remove(self, start: int, unregister: Callable[[int], Any]) -> None:
        """The end of one `add` that was True; `unregister` lets go what has no user any more."""
        with self._lock:
            self._users[start] -= 1
            if self._users[start]:
                return
            place = bisect.bisect_left(self._starts, start)
            del self._starts[place], self._ends[place], self._users[start]
            unregister(start)

    def outside(self, pages: Sequence[Page], places: Sequence[int]) -> list[int]:
        """Those of `places` whose page does not lie in ranges, each of its segments in one."""
        with self._lock:  # not for longer: one call's pages are no other call's business
            starts, ends = list(self._starts), list(self._ends)
        found: list[int] = []
        for number in places:
            for start, nbytes in pages[number].addresses or ((0, 1),):
                place = bisect.bisect_right(starts, start)
                if not place or ends[place - 1] < start + nbytes:
                    found.append(number)
                    break
        return found

    def _overlaps(self, place: int, start: int, nbytes: int) -> bool:
        before = place > 0 and self._ends[place - 1] > start
        return before or (place < len(self._starts) and self._starts[place] < start + nbytes)
