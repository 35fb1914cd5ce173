"""Announce the pages that a storage has gained and lost.

An event only says what the store has confirmed. A page is gained when a save of it is OK. A page that
was announced is lost when a load or lookup does not find it, when a delete returns True, or when the
key space is cleared. A timeout or an error changes nothing, also of the part that may have the page.

Calls overlap, so a lookup may report a miss after a save has stored the page. A page is lost only in a
call that began after the page was announced. If it is gone all the same, the next lookup misses it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

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
    from collections.abc import Callable, Iterable, Mapping

    from hicache_storage.events.messages import BlockHash
    from hicache_storage.events.settings import EventSettings, HashFormat
    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.observer import Clearance, Deletion, Lookup, Move

_GONE = frozenset({Verdict.MISS, Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})
"""Verdicts of a load that mean the store has no such page. A wrong page is deleted."""


class EventObserver(Observer):
    """An observer that publishes events for the announced key spaces. Thread-safe.

    A page may be in several key spaces, for example of a target and its draft. It is gained when one
    call has saved it in all of them, and lost as soon as one of them lacks it. If no call saved two
    key spaces together, for example those of two tenants, their pages with equal hashes count as
    different pages. Only the loss of the last such page is announced.
    """

    def __init__(
        self,
        settings: EventSettings,
        *,
        announces: Callable[[KeySpace], bool],
        hash_format: HashFormat,
        rank: int | None = None,
    ) -> None:
        """Open the publisher. `announces` returns True for key spaces whose pages have events.

        Raises:
            ConfigError: An address is malformed or in use.
        """
        self._settings = settings
        self._announced_spaces = announces
        self._form: HashFormat = settings.block_hashes or hash_format
        self._rank = rank
        self._announced = AnnouncedPages(settings.remembered_pages)
        # Holding this lock keeps the events of a page in the order of its changes.
        self._order = threading.Lock()
        self._publisher = acquire_publisher(settings, rank)
        self._owner_pid = os.getpid()
        self._closed = False

    def moved(self, move: Move, began_ns: int) -> None:
        found: dict[str, dict[KeySpace, Verdict]] = {}
        for transfer, verdicts in zip(move.transfers, move.outcome.verdicts, strict=True):
            if self._announces(transfer.space):
                for page_hash, verdict in zip(transfer.hashes, verdicts, strict=True):
                    found.setdefault(page_hash, {})[transfer.space] = verdict
        if move.direction == "load":
            lost = [
                (space, page_hash)
                for page_hash, answers in found.items()
                for space, verdict in answers.items()
                if verdict in _GONE
            ]
            self._lose(lost, began_ns)
        else:
            self._gain(found)

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        lost = [
            (space, page_hash)
            for space, answers in zip(lookup.spaces, lookup.answers, strict=True)
            if self._announces(space)
            for page_hash, answer in zip(lookup.hashes, answers, strict=True)
            if answer is False
        ]
        self._lose(lost, began_ns)

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        if self._announces(deletion.space):
            self._lose([(deletion.space, page_hash) for page_hash in deletion.gone], began_ns)

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        if not self._announces(clearance.space):
            return
        with self._order:
            blocks, is_all = self._announced.clear(clearance.space, began_ns)
            if is_all:
                self._publisher.publish([AllBlocksCleared()])
            elif blocks:
                self._publisher.publish([BlockRemoved(blocks, self._settings.medium)])

    def stats(self) -> dict[str, int]:
        return self._publisher.stats()

    def close(self) -> None:
        if not self._closed and self._owner_pid == os.getpid():
            self._closed = True
            release_publisher(self._settings, self._rank)

    def _announces(self, space: KeySpace) -> bool:
        """Return whether `space` has events. No key space has events in a forked child."""
        return self._owner_pid == os.getpid() and self._announced_spaces(space)

    def _gain(self, found: Mapping[str, Mapping[KeySpace, Verdict]]) -> None:
        """Announce the pages that are OK in every key space in which the call saved them."""
        groups: dict[tuple[KeySpace, ...], list[BlockHash]] = {}
        for page_hash, answers in found.items():
            if set(answers.values()) == {Verdict.OK}:
                groups.setdefault(tuple(answers), []).append(block_hash(page_hash, self._form))
        for spaces, blocks in groups.items():
            stored = BlockStored(blocks, spaces[0].page_tokens, self._settings.medium)
            with self._order:
                self._announced.add(blocks, spaces)
                self._publisher.publish([stored])

    def _lose(self, pages: Iterable[tuple[KeySpace, str]], began_ns: int) -> None:
        lost = [(space, block_hash(page_hash, self._form)) for space, page_hash in pages]
        if not lost:
            return
        with self._order:
            blocks = self._announced.remove(lost, began_ns)
            if blocks:
                self._publisher.publish([BlockRemoved(blocks, self._settings.medium)])


class _Group(NamedTuple):
    """Key spaces in which one call saved a page together."""

    spaces: frozenset[KeySpace]
    left: frozenset[KeySpace]
    """The key spaces among `spaces` that were not cleared since that call."""
    since_ns: int
    """When the page was announced."""


class AnnouncedPages:
    """The last `limit` pages that were announced as stored. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: OrderedDict[BlockHash, tuple[_Group, ...]] = OrderedDict()
        self._spaces: dict[KeySpace, int] = {}
        """The key spaces that may have announced pages, including pages that were forgotten, and when
        the last of them was announced."""
        self._has_more_spaces = False
        """True if there were ever too many key spaces for this set. Clients choose their number."""

    def add(self, blocks: Iterable[BlockHash], spaces: Iterable[KeySpace]) -> None:
        """Add pages that all of `spaces` have."""
        with self._lock:
            together = frozenset(spaces)
            added = _Group(together, together, time.monotonic_ns())
            self._note(together, added.since_ns)
            for block in blocks:
                others = [one for one in self._pages.get(block, ()) if one.spaces != together]
                self._pages[block] = (*others[-_MOST_GROUPS + 1 :], added)
                self._pages.move_to_end(block)
            while len(self._pages) > self._limit:
                self._pages.popitem(last=False)

    def remove(self, pages: Iterable[tuple[KeySpace, BlockHash]], began_ns: int) -> list[BlockHash]:
        """Remove pages that a key space lacked in a call that began at `began_ns`.

        Returns:
            Each page that no key space has any more, once.
        """
        removed: list[BlockHash] = []
        with self._lock:
            if not self._pages:
                return removed
            for space, block in pages:
                groups = self._pages.get(block, ())
                left = tuple(
                    group
                    for group in groups
                    if space not in group.spaces or began_ns < group.since_ns
                )
                if self._keep(block, groups, left):
                    removed.append(block)
        return removed

    def clear(self, space: KeySpace, began_ns: int) -> tuple[list[BlockHash], bool]:
        """Note that a key space was emptied by a call that began at `began_ns`.

        Returns:
            The pages that no key space has any more, and True if no announced page is left.
        """
        with self._lock:
            if space not in self._spaces and not self._has_more_spaces:
                return [], False
            if self._spaces.get(space, 0) <= began_ns:
                self._spaces.pop(space, None)
            cleared = {space}
            removed: list[BlockHash] = []
            for block, groups in [*self._pages.items()]:
                left = tuple(
                    group._replace(left=group.left - cleared)
                    if space in group.left and group.since_ns <= began_ns
                    else group
                    for group in groups
                )
                if self._keep(block, groups, tuple(group for group in left if group.left)):
                    removed.append(block)
            return removed, not self._spaces and not self._has_more_spaces

    def _note(self, spaces: Iterable[KeySpace], now_ns: int) -> None:
        self._spaces |= dict.fromkeys(spaces, now_ns)
        if len(self._spaces) > _MOST_SPACES:
            self._spaces.clear()
            self._has_more_spaces = True

    def _keep(self, block: BlockHash, groups: tuple[_Group, ...], left: tuple[_Group, ...]) -> bool:
        """Keep the remaining groups of a page. Return True if the page had groups and none remains."""
        if left:
            self._pages[block] = left
        elif groups:
            del self._pages[block]
        return bool(groups) and not left


_MOST_SPACES = 4096
_MOST_GROUPS = 64
"""How many tenants are remembered for one page, the latest first, because clients choose the number of
tenants. If only forgotten tenants still have a page, it is announced as removed, which costs a router
a hit."""
