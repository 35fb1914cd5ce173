"""Host memory that is registered with a native client."""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.page import Page


class RegisteredMemory:
    """Disjoint address ranges, each with the number of its users. Thread-safe.

    The client library refuses a range that overlaps a registered one, or that is already
    registered. But storages that share a client register the same host pool.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._users: dict[int, int] = {}

    def add(self, start: int, nbytes: int, register: Callable[[int, int], int]) -> bool:
        """Add a user of a range. Call `register` for the first user.

        Return False if the range overlaps another one, or if `register` refuses it.
        """
        with self._lock:
            index = bisect.bisect_left(self._starts, start)
            if index < len(self._starts) and self._starts[index] == start:
                if self._ends[index] != start + nbytes:
                    return False
                self._users[start] += 1
                return True
            if self._overlaps(index, start, nbytes) or register(start, nbytes) != 0:
                return False
            self._starts.insert(index, start)
            self._ends.insert(index, start + nbytes)
            self._users[start] = 1
            return True

    def remove(self, start: int, unregister: Callable[[int], Any]) -> None:
        """Undo one `add` that returned True. Call `unregister` after the last user."""
        with self._lock:
            self._users[start] -= 1
            if self._users[start]:
                return
            index = bisect.bisect_left(self._starts, start)
            del self._starts[index], self._ends[index], self._users[start]
            unregister(start)

    def outside(self, pages: Sequence[Page], indices: Sequence[int]) -> list[int]:
        """Return the indices of pages with a segment that no single range contains."""
        with self._lock:  # copy them, because searching for a large batch would block other calls
            starts, ends = list(self._starts), list(self._ends)
        found: list[int] = []
        for index in indices:
            for start, nbytes in pages[index].addresses or ((0, 1),):
                position = bisect.bisect_right(starts, start)
                if not position or ends[position - 1] < start + nbytes:
                    found.append(index)
                    break
        return found

    def _overlaps(self, index: int, start: int, nbytes: int) -> bool:
        before = index > 0 and self._ends[index - 1] > start
        return before or (index < len(self._starts) and self._starts[index] < start + nbytes)
