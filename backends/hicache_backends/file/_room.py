"""Room for new pages: what may be written, and which pages go to make place for it.

Every byte is added to the ledger before it is written, so that no number of processes exceeds the
capacity together. Victims are claimed by renaming them into the claimer's own directory, which only one
process can do, and are overwritten there or unlinked.

What a writer was promised, and what it has claimed and not yet taken off the ledger, is noted in its own
directory (`pend`): a survey allows for it, and never makes the ledger lower than the truth.
"""

from __future__ import annotations

import heapq
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file._victims import Victim, Victims
from hicache_backends.file._writer import collect_dead, pending_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_backends.file._layout import Layout
    from hicache_backends.file._ledger import Ledger
    from hicache_backends.file._writer import Writer
    from hicache_storage.counters import Counters

logger = logging.getLogger(__name__)

# A survey keeps the oldest eighth within these bounds: few surveys, and some 40 MB at most.
_LEAST_QUEUE = 1 << 16
_MOST_QUEUE = 1 << 17
_QUEUED_SHARE = 8
_MOST_STUCK = 1 << 16
_LOOKS = 2
# Small roots are put right before anything is written. Opening a large one does not wait for that.
_FIRST_SURVEY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a file system the pages may take."""

    capacity_nbytes: int | None = None
    min_free_nbytes: int = 0
    recycle: bool = True
    """Victims of the right size may be overwritten in place."""

    @property
    def evict(self) -> bool:
        """Whether pages are ever removed to make room."""
        return self.capacity_nbytes is not None or self.min_free_nbytes > 0


@dataclass(slots=True)
class Grant:
    """Room for a number of pages, and files that may become some of them."""

    pages: int
    page_nbytes: int
    spares: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Census:
    """What a survey counted."""

    pages: int = 0
    nbytes: int = 0


class Room:
    """The room under one root, as one writer sees it. Thread-safe."""

    def __init__(
        self, layout: Layout, limits: Limits, writer: Writer, ledger: Ledger, counters: Counters
    ) -> None:
        self.limits = limits
        self._layout = layout
        self._writer = writer
        self._ledger = ledger
        self._counters = counters
        self._stuck: set[str] = set()
        self._keep = _LEAST_QUEUE
        self._victims: Victims | None = None
        if ledger.doubtful:
            self._survey()
        if limits.evict:
            self._victims = Victims(self._survey)
            self._victims.await_first(time.monotonic() + _FIRST_SURVEY_S)

    def reserve(self, pages: int, page_nbytes: int, deadline_s: float) -> Grant:
        """Room for up to `pages` files of `page_nbytes`. `settle` ends it, whatever was written."""
        capacity = self.limits.capacity_nbytes
        most = pages if capacity is None else min(pages, capacity // page_nbytes)
        grant = Grant(most, page_nbytes)
        if most:
            wanted = most * page_nbytes
            self._writer.pend(wanted)
            self._ledger.add(wanted)
            lacking = self._make_room(grant, deadline_s) if self._victims else 0
            grant.pages = max(0, most + -lacking // page_nbytes)
            self._give_back((most - grant.pages) * page_nbytes)
        self._counters.add("refused_no_space", pages - grant.pages)
        return grant

    def settle(self, grant: Grant, written: int) -> None:
        """The end of a grant: `written` pages are in place, the rest of the room is given back."""
        for path in grant.spares:
            with suppress(OSError):
                os.unlink(path)
        if written and self._victims:
            self._victims.added()
        self._writer.pend(-written * grant.page_nbytes)
        self._give_back((grant.pages - written) * grant.page_nbytes)

    def remove(self, path: str, nbytes: int) -> bool:
        """Unlink a page file that was granted `nbytes`; False where there was none."""
        self._writer.pend(nbytes)
        try:
            os.unlink(path)
            self._ledger.add(-nbytes)
        except FileNotFoundError:
            return False
        finally:
            self._writer.pend(-nbytes)
        return True

    def replaced(self, nbytes: int) -> None:
        """Page files of `nbytes` in all were replaced by others, which have been granted room."""
        self._ledger.add(-nbytes)

    def relieve(self, nbytes: int, deadline_s: float) -> None:
        """Evict `nbytes` after the file system was found full, so that the next batch fits."""
        if self._victims:
            self._evict(nbytes, Grant(0, 0), deadline_s)

    def close(self) -> None:
        """End the survey. Idempotent."""
        if self._victims:
            self._victims.close()

    def _give_back(self, nbytes: int) -> None:
        if nbytes:
            self._ledger.add(-nbytes)
            self._writer.pend(-nbytes)

    def _make_room(self, grant: Grant, deadline_s: float) -> int:
        """Evict until the grant fits; the bytes by which it still does not."""
        for _ in range(_LOOKS):  # a survey in between may have put the ledger right
            lacking = self._short(grant)
            if lacking <= 0 or self._evict(lacking, grant, deadline_s) >= lacking:
                return 0
        return min(max(0, self._short(grant)), grant.pages * grant.page_nbytes)

    def _short(self, grant: Grant) -> int:
        """The bytes that must go: of what is over the capacity, as much as this grant put there."""
        wanted = grant.pages * grant.page_nbytes
        short = 0
        if self.limits.capacity_nbytes is not None:
            short = min(self._ledger.used - self.limits.capacity_nbytes, wanted)
        if self.limits.min_free_nbytes:
            new = wanted - len(grant.spares) * grant.page_nbytes
            short = max(short, self.limits.min_free_nbytes + new - self._free_nbytes())
        return short

    def _free_nbytes(self) -> int:
        status = os.statvfs(self._layout.root)
        return status.f_bavail * status.f_frsize

    def _evict(self, nbytes: int, grant: Grant, deadline_s: float) -> int:
        """Claim the oldest pages until `nbytes` are free, and tell the ledger; how many are."""
        assert self._victims is not None
        freed = pended = 0
        self._victims.await_first(deadline_s)
        while freed < nbytes:
            victim = self._victims.next(deadline_s)
            if victim is None:
                break
            if pended < freed + victim.nbytes:
                more = max(nbytes, freed + victim.nbytes) - pended
                self._writer.pend(more)
                pended += more
            if self._claim(victim, grant):
                freed += victim.nbytes
        self._ledger.add(-freed)
        self._writer.pend(-pended)
        return freed

    def _claim(self, victim: Victim, grant: Grant) -> bool:
        """Take a page out of its key space; False where it is gone, in use again, or can't be moved."""
        path = self._writer.temp_path()
        try:
            status = os.stat(victim.path, follow_symlinks=False)
            if (status.st_mtime_ns, status.st_size) != (victim.modified_ns, victim.nbytes):
                return False
            os.rename(victim.path, path)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.debug("a page cannot be evicted: %s", error)
            self._counters.add("unremovable")
            if len(self._stuck) < _MOST_STUCK:
                self._stuck.add(victim.path)
            return False
        self._counters.add("evicted")
        fits = self.limits.recycle and victim.nbytes == grant.page_nbytes and status.st_nlink == 1
        if fits and len(grant.spares) < grant.pages:
            grant.spares.append(path)
        else:
            with suppress(OSError):
                os.unlink(path)
        return True

    # --- the survey, in the thread of the victims' queue ----------------------------------------------

    def _survey(self) -> list[Victim]:
        """Put the ledger right, collect dead writers, enforce the capacity; a heap of old pages."""
        self._counters.add("dead_writers", collect_dead(self._layout.writers))
        since = self._ledger.totals()
        pending = pending_nbytes(self._layout.writers)
        census = Census()
        oldest = self._oldest(self._seen(census))
        if self._victims is not None and self._victims.closed:
            return []
        pending += pending_nbytes(self._layout.writers)
        self._ledger.settle(census.nbytes, pending, since)
        self._keep = min(max(_LEAST_QUEUE, census.pages // _QUEUED_SHARE), _MOST_QUEUE)
        return self._trimmed(oldest)

    def _oldest(self, seen: Iterator[Victim]) -> list[Victim]:
        """A heap of the oldest pages. Nothing here is sorted: that would stop all threads for long."""
        youngest_first: list[Victim] = []
        for victim in seen:
            inverse = Victim(-victim.modified_ns, victim.nbytes, victim.path)
            if len(youngest_first) < self._keep:
                heapq.heappush(youngest_first, inverse)
            else:
                heapq.heappushpop(youngest_first, inverse)
        oldest = [
            Victim(-victim.modified_ns, victim.nbytes, victim.path) for victim in youngest_first
        ]
        heapq.heapify(oldest)
        return oldest

    def _seen(self, census: Census) -> Iterator[Victim]:
        for entry in self._layout.all_pages():
            if self._victims is not None and self._victims.closed:
                return
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            census.pages += 1
            census.nbytes += status.st_size
            if entry.path not in self._stuck:
                yield Victim(status.st_mtime_ns, status.st_size, entry.path)

    def _trimmed(self, oldest: list[Victim]) -> list[Victim]:
        """Evict what is over a capacity that was lowered, or filled behind the ledger's back."""
        capacity = self.limits.capacity_nbytes
        if capacity is None:
            return oldest
        while oldest:
            promised = pending_nbytes(self._layout.writers)
            if self._ledger.totals().used - promised <= capacity:
                break
            victim = heapq.heappop(oldest)
            self._writer.pend(victim.nbytes)
            if self._claim(victim, Grant(0, 0)):
                self._ledger.add(-victim.nbytes)
            self._writer.pend(-victim.nbytes)
        return oldest
