"""A page of L2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.controller.pool_set import Bits, PageSlots


@dataclass(slots=True, eq=False)
class Entry:
    """A page of L2, in every pool. Its fields are the cache's to change, under its lock."""

    page_hash: str
    slots: PageSlots
    """In each pool of every page, always; in a trailing pool where a window needs it."""
    filled: Bits
    """Pools whose slot holds the page. The others' slots hold anything, and nobody may read them."""
    stored: Bits
    """Pools of which L3 has the page, or gave it up: nothing is lost there when it is evicted."""
    busy: Bits = 0
    """Pools whose slot somebody is filling: a load, or an engine that computes it again."""
    pins: int = 1
    uses: int = 1
    queued: bool = False
    """It is waiting to be written, or being written."""
    leaving: bool = False
    """It is being written so that it can be evicted."""

    def owed(self, written: Bits) -> Bits:
        """Of the pools that are `written` to L3, those of which it has not got the page."""
        return self.filled & ~self.stored & written
