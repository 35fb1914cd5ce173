"""When a storage last saw the manifests of the key spaces to which it writes."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.keys import KeySpace

_INTERVAL_S = 60.0
_MOST_SPACES = 4096


class Registrations:
    """A manifest is assumed to stay for a minute: others may remove it while pages are written.

    Thread-safe. Clients choose the number of key spaces. Once there were more than it remembers, one
    that it does not know counts as forgotten, and is due.
    """

    def __init__(self) -> None:
        self._seen_at_s: dict[KeySpace, float] = {}
        self._has_forgotten = False

    def is_due(self, space: KeySpace) -> bool:
        """Return True where the manifest must be looked for, and written if it is not there."""
        seen_at_s = self._seen_at_s.get(space)
        if seen_at_s is None:
            return self._has_forgotten
        return time.monotonic() - seen_at_s > _INTERVAL_S

    def note(self, space: KeySpace) -> None:
        """Note that the manifest was there just now."""
        if len(self._seen_at_s) >= _MOST_SPACES:
            self._seen_at_s.clear()
            self._has_forgotten = True
        self._seen_at_s[space] = time.monotonic()

    def forget(self, space_id: str) -> None:
        """Note that the manifest was removed."""
        for space in [one for one in tuple(self._seen_at_s) if one.id == space_id]:
            self._seen_at_s[space] = -math.inf
