"""L2's table of contents: page hash → a slot in the host pool of every pool, LRU with pins."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from hicache_storage.controller.pools import CachePool
    from hicache_storage.transfer import Transfer

    Slots: TypeAlias = tuple[int, ...]
    """One slot in each pool, in the order of the pools: allocated, freed and moved together."""


@dataclass(slots=True, eq=False)
class Entry:
    """A page of L2, in every pool. Its fields are the cache's to change, under its lock."""

    page_hash: str
    slots: Slots
    stored: bool
    """It is in L3, or was given up there: nothing is lost when it is evicted."""
    pins: int = 1
    uses: int = 1
    queued: bool = False
    """It is waiting to be written, or being written."""
    leaving: bool = False
    """It is being written so that it can be evicted."""


class HostCache:
    """The pages of L2. Thread-safe; pinned pages stay, the others go in LRU order.

    `write_back` is called, without the lock, with entries that must be written before they can go. They
    are pinned for it; `written` and `unpin` end that.
    """

    def __init__(
        self,
        pools: Sequence[CachePool],
        *,
        write_back: Callable[[list[Entry]], None] | None = None,
    ) -> None:
        self.pools = tuple(pools)
        self._write_back = write_back
        self._entries: dict[str, Entry] = {}
        self._idle: OrderedDict[str, Entry] = OrderedDict()
        self._changed = threading.Condition()
        self._evicted = 0
        self._leaving = 0

    @property
    def evicted_pages(self) -> int:
        """Pages that made room for others."""
        return self._evicted

    def __len__(self) -> int:
        return len(self._entries)

    def acquire(self, hashes: Iterable[str]) -> list[Entry]:
        """Pin the leading run of `hashes` that L2 has. Each use counts."""
        found: list[Entry] = []
        with self._changed:
            for page_hash in hashes:
                entry = self._entries.get(page_hash)
                if entry is None:
                    break
                entry.uses += 1
                self._pin(entry)
                self._stay(entry)
                found.append(entry)
        return found

    def missing_run(self, hashes: Sequence[str]) -> int:
        """How many leading `hashes` L2 lacks."""
        with self._changed:
            return next((n for n, h in enumerate(hashes) if h in self._entries), len(hashes))

    def allocate(self, pages: int, *, timeout_s: float = 0.0) -> list[Slots]:
        """Slots for up to `pages` pages, in all pools alike, evicting what is idle.

        Fewer where the rest is pinned or must be written first; with `timeout_s` it waits that long for
        the first of them.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            got, dirty = self._allocate_now(pages, max(0.0, left_s))
            if dirty and self._write_back is not None:
                self._write_back(dirty)
            if got or not pages or left_s <= 0:
                return got

    def _allocate_now(self, pages: int, timeout_s: float) -> tuple[list[Slots], list[Entry]]:
        """The slots that there are, and the pages that must be written before there are more."""
        got: list[Slots] = []
        dirty: list[Entry] = []
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(pages), timeout_s)
            while len(got) + self._leaving < pages:
                slots = self._take()
                if slots is not None:
                    got.append(slots)
                elif not self._evict(dirty):
                    break
        return got, dirty

    def insert(self, page_hash: str, slots: Slots, *, stored: bool) -> Entry:
        """Make a filled page part of L2, pinned. Where it is there already, the new slots are freed."""
        with self._changed:
            entry = self._entries.get(page_hash)
            if entry is None:
                entry = self._entries[page_hash] = Entry(page_hash, slots, stored)
                return entry
            entry.stored |= stored
            self._pin(entry)
            self._free(slots)
            return entry

    def free(self, slots: Iterable[Slots]) -> None:
        """Give slots back that never became part of L2."""
        with self._changed:
            for group in slots:
                self._free(group)
            self._changed.notify_all()

    def unpin(self, entries: Sequence[Entry]) -> None:
        """Let go of pinned pages, the last first: a prefix loses its tail before its head."""
        with self._changed:
            for entry in reversed(entries):
                entry.pins -= 1
                if not entry.pins:
                    self._idle[entry.page_hash] = entry
                    if self._stay(entry):  # written to be evicted: the next to go
                        self._idle.move_to_end(entry.page_hash, last=False)
            self._changed.notify_all()

    def claim_for_writing(self, entries: Iterable[Entry], uses: int) -> list[Entry]:
        """Those of `entries` with enough uses that are not in L3 nor on their way; each is pinned."""
        with self._changed:
            claimed = [
                entry
                for entry in entries
                if entry.uses >= uses and not entry.stored and not entry.queued
            ]
            for entry in claimed:
                entry.queued = True
                self._pin(entry)
        return claimed

    def written(self, entries: Sequence[Entry], stored: Sequence[bool]) -> None:
        """The end of writing `entries`, which stay pinned until `unpin`."""
        with self._changed:
            for entry, ok in zip(entries, stored, strict=True):
                entry.queued = False
                # A page that was to be written at its eviction and could not be is forgotten.
                entry.stored |= ok or self._write_back is not None

    def give_up(self, entries: Sequence[Entry]) -> None:
        """`entries` will not be written: unpin them, and let them be evicted without it."""
        self.written(entries, [False] * len(entries))
        self.unpin(entries)

    def unwritten(self) -> list[Entry]:
        """All pages that L3 lacks, claimed for writing: what a write-back cache owes at its end."""
        with self._changed:
            everything = list(self._entries.values())
        return self.claim_for_writing(everything, uses=0)

    def transfers(self, hashes: Sequence[str], groups: Sequence[Slots]) -> list[Transfer]:
        """The pages of `groups` on their way to or from L3, in every pool."""
        return [
            transfer
            for number, pool in enumerate(self.pools)
            for transfer in pool.transfers(hashes, [group[number] for group in groups])
        ]

    def clear(self) -> int:
        """Drop every idle page; how many pages are pinned and stayed."""
        with self._changed:
            while self._idle:
                self._drop(self._idle.popitem(last=False)[1])
            self._changed.notify_all()
            return len(self._entries)

    def _pin(self, entry: Entry) -> None:
        entry.pins += 1
        self._idle.pop(entry.page_hash, None)

    def _stay(self, entry: Entry) -> bool:
        """Whether `entry` was on its way out, which it is no longer."""
        was_leaving, entry.leaving = entry.leaving, False
        self._leaving -= was_leaving
        return was_leaving

    def _has_room(self, pages: int) -> bool:
        if all(pool.host.free_slots for pool in self.pools):
            return True
        return bool(self._idle) and self._leaving < pages

    def _take(self) -> Slots | None:
        """One slot in every pool, or none in any."""
        taken: list[int] = []
        for pool in self.pools:
            slot = pool.host.allocate(1)
            if slot is None:
                self._free(taken)
                return None
            taken += slot
        return tuple(taken)

    def _evict(self, dirty: list[Entry]) -> bool:
        """Let the page go that was idle longest, by way of `dirty` where it must be written first."""
        if not self._idle:
            return False
        _, entry = self._idle.popitem(last=False)
        if entry.stored or self._write_back is None:
            self._drop(entry)
            self._evicted += 1
        else:
            entry.pins += 1
            entry.queued = entry.leaving = True
            self._leaving += 1
            dirty.append(entry)
        return True

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.page_hash]
        self._free(entry.slots)

    def _free(self, slots: Sequence[int]) -> None:
        for pool, slot in zip(self.pools, slots, strict=False):
            pool.host.free([slot])
