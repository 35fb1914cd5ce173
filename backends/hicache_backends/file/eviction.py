"""The choice of the pages to evict next: the oldest of those that a sweep over the root has seen.

A sweep looks at the directories of the root in turn. It looks at some pages at a time, whenever
eviction needs more of them, and keeps the oldest as candidates. Hashes spread pages evenly over the
directories, so any part of a sweep is a fair sample: eviction may take a quarter of the pages that
it saw. A candidate is checked once more before it is evicted. So a page that was used in the
meantime stays, and no two processes evict the same page.

In a small store each process sweeps by itself, and evicts pages in the exact order of their age. In
a large store all processes share one sweep: `survey/turn` contains the number of the next
directory, and each process has its own candidates. If each process swept a large store by itself,
old pages would survive in parts that no process has visited for long, and younger pages would be
evicted.

A page with a time in the future, from a clock that was wrong, counts as the oldest: by its time, it
would never be evicted. A get gives it a true time.

When one process has swept the whole root, it has also counted the bytes of all pages, and corrects
the ledger.
"""

from __future__ import annotations

import math
import os
import random
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.file.layout import SHARDS
from hicache_backends.file.ledger import Totals
from hicache_backends.file.writer import collect_dead, total_pending_nbytes
from hicache_storage import native
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import open_own

if TYPE_CHECKING:
    from hicache_backends.file.clock import RootClock
    from hicache_backends.file.layout import Layout
    from hicache_backends.file.ledger import Ledger
    from hicache_storage.backend_support.counters import Counters

# With these values, a trace of conversations gets the hits of an exact LRU, within 0.1 points.
_TAKEN_SHARE = 4
_MOST_CANDIDATES = 1 << 12
_PAGES_A_LOOK = 1 << 9
_PAGES_A_LISTING = 1 << 10
_FIRST_SHARDS = 4
# A batch that fails or is late has claimed at most this many pages.
_MOST_TAKEN = 1 << 8
_MOST_UNREMOVABLE = 1 << 16
# A sweep that found nothing to evict is not repeated at once, because the next one would find
# nothing.
_PAUSE_PER_SWEEP_S = 10
_LEAST_PAUSE_S = 0.05
_LEDGER_WAIT_S = 1.0
_TURN = struct.Struct("<Q")


class Victim(NamedTuple):
    """A page file as a sweep saw it. Victims sort by age."""

    used_ns: int
    """The time of its last use, or 0 if the file has a time that cannot be true."""
    nbytes: int
    path: str
    modified_ns: int


class EvictionSweep:
    """The sweeps of one process over one root. Thread-safe; holds no lock during I/O."""

    def __init__(
        self,
        layout: Layout,
        ledger: Ledger,
        clock: RootClock,
        counters: Counters,
        *,
        turns: str = "",
    ) -> None:
        """Sweep a root. `turns` is the file through which processes share a sweep, if any."""
        self._layout = layout
        self._ledger = ledger
        self._clock = clock
        self._counters = counters
        self._turns = turns
        self._own_turn = start = random.randrange(len(SHARDS))
        self._shards = SHARDS[start:] + SHARDS[:start]
        # `with` the condition itself could leave it locked after an interrupt.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = self._is_looking = False
        self._candidates: list[Victim] = []
        """The oldest pages that were seen, oldest first."""
        self._takeable = 0.0
        """How many candidates may be taken before the next look."""
        self._empty_until_s = 0.0
        self._unremovable: set[str] = set()
        self.sweeps = 0
        """How many sweeps have been completed."""
        self.is_exact = False
        """True if no page was written or removed during the last sweep, so that the ledger is exact."""
        # Only the thread that is looking at pages uses the fields below.
        self._next_shard = 0
        self._shards_a_listing = _FIRST_SHARDS
        self._listed: list[str] = []
        """Pages that were listed but not looked at yet."""
        self._are_all = True
        """True if the candidates are all pages that this sweep has seen."""
        self._is_large = False
        """True if the store has more pages than we keep candidates."""
        self._barren_shards = 0
        """How many directories in a row had no page to evict."""
        self._barren_since_s = 0.0
        self._since = Totals(0, 0)
        self._pending = self._nbytes = 0
        self._looks = self._ended_looks = 0
        """How many looks of this sweep have begun, and have ended. Interrupted ones do not end."""

    def take(self, nbytes: int, deadline: Deadline) -> list[Victim]:
        """Return the oldest candidates, until they have `nbytes` together or there are no more.

        The list is empty if no page was found in time. A look takes at most half of the time,
        because the pages must still be evicted.
        """
        victims = self._pop(nbytes)
        while not victims and self._look_further(deadline):
            victims = self._pop(nbytes)
        return victims

    def put_back(self, late: list[Victim], vain: int) -> None:
        """Put back victims for which there was no time.

        `vain` is the number of other victims, which were gone or had been used.
        """
        with self._lock:
            self._candidates[:0] = late
            self._takeable = min(self._takeable + len(late) + vain, len(self._candidates))

    def skip(self, path: str) -> None:
        """Exclude a page that this process may not remove."""
        if len(self._unremovable) < _MOST_UNREMOVABLE:
            self._unremovable.add(path)

    def note_new_pages(self) -> None:
        """Note that pages were added: look again even if the last sweep found nothing."""
        self._empty_until_s = 0.0

    def sweep(self) -> list[Victim]:
        """Look at every page once and return the oldest. `stop` ends this early.

        Afterwards the ledger is correct. Only one thread may call this.
        """
        first = self.sweeps + (self._next_shard > 0)
        while self.sweeps <= first and not self._stopped:
            self._look(Deadline(math.inf))
        found, self._candidates = self._candidates, []
        return found

    def add(self, found: list[Victim]) -> None:
        """Add candidates that another sweep has found."""
        removable = [victim for victim in found if victim.path not in self._unremovable]
        self._add(removable, {victim.path for victim in found})

    def stop(self) -> None:
        """End running sweeps soon, and wake up threads that wait for pages."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    # --- parts -----------------------------------------------------------------------------------

    def _pop(self, nbytes: int) -> list[Victim]:
        with self._lock:
            most, count = min(int(self._takeable), len(self._candidates), _MOST_TAKEN), 0
            while count < most and nbytes > 0:
                nbytes -= self._candidates[count].nbytes
                count += 1
            victims = self._candidates[:count]
            del self._candidates[:count]
            self._takeable -= count
            return victims

    def _look_further(self, deadline: Deadline) -> bool:
        """Look at more pages, or wait for a thread that does. Return False if that does not help."""
        is_mine = False
        try:
            with self._lock:
                if self._stopped or deadline.passed() or time.monotonic() < self._empty_until_s:
                    return False
                if self._is_looking:
                    return self._changed.wait(deadline.remaining_s())
                self._is_looking = is_mine = True
            self._look(Deadline(deadline.remaining_s() / 2))
        finally:
            if is_mine:
                self._is_looking = False
                with self._lock:
                    self._changed.notify_all()
        return True

    def _look(self, deadline: Deadline) -> None:
        """Look at the next pages of the sweep."""
        # If an interrupt ended the last look, that look may have seen pages.
        self._barren_shards *= self._looks == self._ended_looks
        self._looks += 1
        if not self._listed and self._is_large and self._turns:
            self._list_shared()
        while not self._listed and self._next_shard < len(SHARDS):
            self._list_own()
        some = self._listed[-_PAGES_A_LOOK:]
        found = native.stat_files([os.fsencode(path) for path in some], deadline.end_s)
        seen: list[Victim] = []
        late: list[str] = []
        latest_ns, newest_ns = self._clock.latest_ns(), 0
        for path, verdict, modified_ns, nbytes in zip(some, *found, strict=True):
            if verdict == native.LATE:
                late.append(path)
            elif verdict == native.HIT:
                self._nbytes += nbytes
                used_ns = modified_ns if modified_ns <= latest_ns else 0
                newest_ns = max(newest_ns, used_ns)
                if path not in self._unremovable:
                    seen.append(Victim(used_ns, nbytes, path, modified_ns))
        self._clock.note_used(newest_ns)
        self._listed[len(self._listed) - len(some) :] = late
        if seen or native.MISS in found[0]:  # a miss: other processes evict meanwhile, and store
            self._barren_shards = 0
        self._add(seen, set(some), is_slow=bool(late))
        if not self._listed and self._next_shard == len(SHARDS):
            self._end_sweep()
        if self._barren_shards >= len(SHARDS) and not self._listed:
            self._pause()
        self._ended_looks += 1

    def _list_own(self) -> None:
        """List the pages of the next directories of this process's own sweep."""
        if not self._next_shard:
            self._begin_sweep()
        shards = self._shards[self._next_shard : self._next_shard + self._shards_a_listing]
        self._list(shards)
        self._next_shard += len(shards)

    def _list_shared(self) -> None:
        """List the pages of the next directories of the sweep that all processes share."""
        first, count = self._take_turn(), self._shards_a_listing
        self._list([SHARDS[number % len(SHARDS)] for number in range(first, first + count)])
        if len(self._listed) * len(SHARDS) < count * _MOST_CANDIDATES / 2:  # pages were removed
            self._is_large, self._next_shard = False, 0

    def _take_turn(self) -> int:
        """Return the number of the next directory, and advance it for all processes.

        If two processes do this at once, they look at the same pages, which does no harm.
        """
        turn = self._own_turn
        with suppress(OSError):
            fd = open_own(self._turns, os.O_RDWR | os.O_CREAT)
            try:
                record = os.pread(fd, _TURN.size + 1, 0)
                if len(record) in (0, _TURN.size):  # a file of any other length is not ours
                    turn = _TURN.unpack(record)[0] if record else turn
                    os.pwrite(fd, _TURN.pack((turn + self._shards_a_listing) % len(SHARDS)), 0)
            finally:
                os.close(fd)
        self._own_turn = (turn + self._shards_a_listing) % len(SHARDS)
        return turn

    def _list(self, shards: list[str]) -> None:
        """List the pages of these directories in all key spaces, in random order."""
        if not self._barren_shards:
            self._barren_since_s = time.monotonic()
        self._listed = list(self._layout.pages_in(shards))
        random.shuffle(self._listed)
        self._barren_shards += len(shards)
        pages_a_shard = (len(self._listed) + 1) / len(shards)
        self._shards_a_listing = max(1, int(_PAGES_A_LISTING / pages_a_shard))

    def _add(self, seen: list[Victim], looked_at: set[str], *, is_slow: bool = False) -> None:
        """Add candidates, replacing what was known about the pages in `looked_at`.

        In a small store no candidate may be taken before the sweep ends, because only then the
        order of all pages is known. If the file system `is_slow`, there is no time to see all
        pages, so take some earlier.
        """
        with self._lock:
            kept = [victim for victim in self._candidates if victim.path not in looked_at]
            kept += seen
            kept.sort()
            if len(kept) > _MOST_CANDIDATES:
                self._are_all, self._is_large = False, True
                del kept[_MOST_CANDIDATES:]
            self._candidates = kept
            if is_slow or not self._are_all:
                self._takeable += len(seen) / _TAKEN_SHARE
            self._takeable = min(self._takeable, len(kept))

    def _begin_sweep(self) -> None:
        self._counters.add("dead_writers", collect_dead(self._layout.writers))
        self._since = self._ledger.totals(Deadline(_LEDGER_WAIT_S))
        self._pending = total_pending_nbytes(self._layout.writers)
        self._nbytes = 0
        self._looks, self._ended_looks = 1, 0
        self._are_all = True
        self._shards_a_listing = _FIRST_SHARDS  # other processes may have added many pages

    def _end_sweep(self) -> None:
        pending = self._pending + total_pending_nbytes(self._layout.writers)
        limit = Deadline(_LEDGER_WAIT_S)
        self.is_exact = self._looks == self._ended_looks + 1 and self._ledger.correct(
            self._nbytes, pending, self._since, limit
        )
        self._next_shard = 0
        with self._lock:
            if self._are_all:
                self._takeable = len(self._candidates)
            self.sweeps += 1

    def _pause(self) -> None:
        """Stop looking for a while, because the last look at each directory found no page to evict."""
        now_s = time.monotonic()
        pause_s = max(_LEAST_PAUSE_S, _PAUSE_PER_SWEEP_S * (now_s - self._barren_since_s))
        self._empty_until_s = now_s + pause_s
        self._barren_shards = 0
        self._unremovable.clear()  # no other pages are left, and these may be removable by now
        with self._lock:
            self._candidates.clear()
            self._takeable = 0.0
