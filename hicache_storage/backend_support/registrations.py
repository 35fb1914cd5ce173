"""Remember when a storage last saw the manifests of the key spaces that it writes to."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace

_INTERVAL_S = 60.0
_MOST_SPACES = 4096


class Registrations:
    """A record of the manifests that this storage has seen, and when to look for each one again.

    A manifest that was seen counts as present for a minute. Another process may remove it at any time.
    Clients choose the number of key spaces. If there were ever too many to remember, every key space
    that is not remembered is due. Thread-safe.
    """

    def __init__(self) -> None:
        self._seen_at_s: dict[KeySpace, float] = {}
        self._has_forgotten = False

    def is_due(self, space: KeySpace) -> bool:
        """Return True if it is time to look for the manifest of `space`, and to write a missing one."""
        seen_at_s = self._seen_at_s.get(space)
        if seen_at_s is None:
            return self._has_forgotten
        return time.monotonic() - seen_at_s > _INTERVAL_S

    def note(self, space: KeySpace) -> None:
        """Note that the manifest of `space` exists now."""
        if len(self._seen_at_s) >= _MOST_SPACES:
            self._seen_at_s.clear()
            self._has_forgotten = True
        self._seen_at_s[space] = time.monotonic()

    def forget(self, space_id: str) -> None:
        """Note that the manifest was removed."""
        for space in [one for one in tuple(self._seen_at_s) if one.id == space_id]:
            self._seen_at_s[space] = -math.inf
