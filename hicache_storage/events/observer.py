"""The observer that announces the pages which a storage has gained and lost.

An event says only what the store has said: a save that is OK gains a page. A load or a lookup that does
not find an announced page, a delete that is True, and a clear lose it. A timeout and an error say
nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from hicache_storage.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    block_hash,
)
from hicache_storage.events.publisher import acquire_publisher, release_publisher
from hicache_storage.page_store.observer import Observer
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.events.messages import BlockHash
    from hicache_storage.events.settings import EventSettings, HashFormat
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.observer import Clearance, Deletion, Lookup, Move

_GONE = frozenset({Verdict.MISS, Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})
"""Verdicts of a load after which the store has no such page. A wrong page is deleted."""


class EventObserver(Observer):
    """Publishes the events of the key spaces that are announced. Thread-safe.

    A page of several key spaces, such as a target and its draft, is gained when one call has saved it
    in all of them, and is lost when one of them lacks it.
    """

    def __init__(
        self,
        settings: EventSettings,
        *,
        announces: Callable[[KeySpace], bool],
        hash_format: HashFormat,
        rank: int | None = None,
    ) -> None:
        """Open the publisher. `announces` is True for a key space whose pages have events.

        Raises:
            ConfigError: An address is malformed, or is in use.
        """
        self._settings = settings
        self._announces = announces
        self._form: HashFormat = settings.block_hashes or hash_format
        self._rank = rank
        self._announced = AnnouncedPages(settings.remembered_pages)
        # The events of a page are published in the order of its changes among the announced pages.
        self._order = threading.Lock()
        self._publisher = acquire_publisher(settings, rank)
        self._closed = False

    def moved(self, move: Move, began_ns: int) -> None:
        verdicts: dict[str, set[Verdict]] = {}
        spaces: list[KeySpace] = []
        for transfer, of_one in zip(move.transfers, move.outcome.verdicts, strict=True):
            if self._announces(transfer.space):
                spaces.append(transfer.space)
                for page_hash, verdict in zip(transfer.hashes, of_one, strict=True):
                    verdicts.setdefault(page_hash, set()).add(verdict)
        if move.direction == "load":
            self._lose(page_hash for page_hash, found in verdicts.items() if found & _GONE)
        else:
            self._gain([page for page, found in verdicts.items() if found == {Verdict.OK}], spaces)

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        self._lose(
            page_hash
            for space, answers in zip(lookup.spaces, lookup.answers, strict=True)
            if self._announces(space)
            for page_hash, answer in zip(lookup.hashes, answers, strict=True)
            if answer is False
        )

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        if self._announces(deletion.space):
            self._lose(deletion.gone)

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        if not self._announces(clearance.space):
            return
        with self._order:
            if self._announced.clear(clearance.space):
                self._publisher.publish([AllBlocksCleared()])

    def stats(self) -> dict[str, int]:
        return self._publisher.stats()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            release_publisher(self._settings, self._rank)

    def _gain(self, hashes: Iterable[str], spaces: Sequence[KeySpace]) -> None:
        blocks = [block_hash(page_hash, self._form) for page_hash in hashes]
        if blocks:
            stored = BlockStored(blocks, spaces[0].page_tokens, self._settings.medium)
            with self._order:
                self._announced.add(blocks, spaces)
                self._publisher.publish([stored])

    def _lose(self, hashes: Iterable[str]) -> None:
        with self._order:
            blocks = self._announced.remove(block_hash(one, self._form) for one in hashes)
            if blocks:
                self._publisher.publish([BlockRemoved(blocks, self._settings.medium)])


class AnnouncedPages:
    """The pages that were announced as stored, the last `limit` of them. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: OrderedDict[BlockHash, None] = OrderedDict()
        self._spaces: set[KeySpace] = set()
        """The key spaces that may have announced pages."""

    def add(self, blocks: Iterable[BlockHash], spaces: Iterable[KeySpace]) -> None:
        """Add pages that all these key spaces have."""
        with self._lock:
            self._spaces.update(spaces)
            for block in blocks:
                self._pages[block] = None
                self._pages.move_to_end(block)
            while len(self._pages) > self._limit:
                self._pages.popitem(last=False)

    def remove(self, blocks: Iterable[BlockHash]) -> list[BlockHash]:
        """Remove pages. Return those that had been announced, each once."""
        with self._lock:
            if not self._pages:
                return []
            return [block for block in blocks if self._pages.pop(block, _ABSENT) is not _ABSENT]

    def clear(self, space: KeySpace) -> bool:
        """Note that a key space is empty. Return True if no announced page is left in any of them."""
        with self._lock:
            if space not in self._spaces:
                return False
            self._spaces.discard(space)
            if not self._spaces:
                self._pages.clear()
            return not self._spaces


_ABSENT = object()
