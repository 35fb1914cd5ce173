"""Scans of all pages of a root: the bytes that they take, and which pages are the oldest.

One process scans, and the others take victims from its list (`victims_file`). A process that cannot wait
for a scan evicts the oldest pages of a sample. Pages are spread over their directories by hash, so one
directory of each key space is a fair sample.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import threading
import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from hicache_backends.file.layout import SHARDS
from hicache_backends.file.victims_file import (
    ScanLock,
    ScannedPage,
    TakenVictims,
    Victim,
    VictimsFile,
)
from hicache_backends.file.writer import collect_dead, total_pending_nbytes
from hicache_storage import native
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_backends.file.layout import Layout
    from hicache_backends.file.ledger import Ledger
    from hicache_backends.file.writer import Writer
    from hicache_storage.backend_support.counters import Counters

# A scan keeps the oldest half within these bounds: few scans, and at most some 90 MB of memory.
LEAST_LISTED = 1 << 16
MOST_LISTED = 1 << 19
_LISTED_SHARE = 2
# A page as a scan keeps it: 12 bytes of its age, so that younger pages sort first, 8 of its size, and
# its path below the key spaces. A file system may keep any second of 64 bits.
_AGE_NBYTES = 12
_KEPT_NBYTES = _AGE_NBYTES + 8
_MOST_NS = 1 << 94
_EVICTED_SHARE = 8
_LEAST_SAMPLE = 64
_MOST_SAMPLE = 1 << 10
_SORTED_AT_ONCE = 1 << 11
_MOST_UNREMOVABLE = 1 << 16
# Processes that start together share the scan of the first one.
_FRESH_NS = 60 * 10**9
# A long scan begins while a quarter of the list is left, a short one when the list is used up.
_LOW = 0.25
_LONG_SCAN_NS = 50 * 10**6
_PAGES_A_RENEWAL = 1 << 10
_PAGES_A_CALL = 1 << 9
# The polls of a process that waits for another one's scan. A long scan is polled seldom: many processes
# may wait for it, on a slow file system.
_POLL_S = 0.01
_POLL_SHARE = 0.1
_MOST_POLL_S = 0.5
_LEDGER_WAIT_S = 1.0


@dataclass(slots=True)
class ScanTotals:
    """The counts of one scan."""

    pages: int = 0
    nbytes: int = 0


class CapacityScanner:
    """The scans of one root, as one process makes or awaits them.

    One thread calls `rescan`; everything else is thread-safe. `crashed` means that writers have died, so
    that the ledger may be too high.
    """

    def __init__(
        self,
        layout: Layout,
        writer: Writer,
        ledger: Ledger,
        counters: Counters,
        *,
        crashed: bool,
    ) -> None:
        self._crashed = crashed
        self._layout = layout
        self._writer = writer
        self._ledger = ledger
        self._counters = counters
        self._file = VictimsFile(layout)
        self._lock = ScanLock(layout)
        self._stopping = threading.Event()
        self._unremovable: set[str] = set()
        self._keep = LEAST_LISTED
        self._used_up_ns: int | None = None
        """The begin of the scan whose list is used up, or nearly so."""
        self._first = True

    def rescan(self) -> list[Victim]:
        """Return the first victims of a new list, made by this process or another one."""
        requested_ns = time.time_ns()
        if self._ledger.needs_scan or (self._first and not self._is_fresh()):
            scan = self._file.info()
            self._used_up_ns = scan.begun_ns if scan else None
        self._first = False
        while not self._stopping.is_set():
            is_ours = self._is_our_turn()
            if is_ours:
                try:
                    private = self._scan_and_publish()
                finally:
                    self._lock.release()
                if private:
                    return private
            victims, scan = self._take_removable()
            saw_all = is_ours or scan is None or scan.begun_ns >= requested_ns
            if victims or scan is None or (scan.is_empty and saw_all):
                self._ledger.totals(Deadline(_LEDGER_WAIT_S))
                return victims
        return []

    def take(self, count: int = 1) -> tuple[list[Victim], bool]:
        """Return the next victims, `count` or more, and whether a new list is needed soon."""
        victims, scan = self._take_removable(count)
        return victims, scan is not None and scan.begun_ns == self._used_up_ns

    def sample(self, deadline: Deadline) -> list[Victim]:
        """Return the oldest pages of a sample, which is smaller on a slow file system."""
        limit = Deadline(deadline.remaining_s() / 2)  # the pages are still to be evicted
        seen: list[ScannedPage] = []
        start = random.randrange(len(SHARDS))
        for shard in SHARDS[start:] + SHARDS[:start]:
            paths = list(self._layout.pages_in(shard))
            some = random.sample(paths, min(len(paths), _MOST_SAMPLE))
            seen += self._stat_pages(some, ScanTotals(), limit.end_s)
            if len(seen) >= _LEAST_SAMPLE or limit.passed():
                break
        seen.sort()
        return [Victim(*page) for page in seen[: len(seen) // _EVICTED_SHARE + 1]]

    def skip(self, path: str) -> None:
        """Leave out a page that this process may not remove."""
        if len(self._unremovable) < _MOST_UNREMOVABLE:
            self._unremovable.add(path)

    def stop(self) -> None:
        """End a running scan soon."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    def abandon(self) -> None:
        """Close in a forked child."""
        self._lock.abandon()

    # --- parts -----------------------------------------------------------------------------------

    def _take_removable(self, count: int = 1) -> TakenVictims:
        """Take victims that this process may remove; remember when the list runs low."""
        taken = self._file.take(count)
        victims = self._removable(taken.victims)
        while taken.victims and not victims:
            taken = self._file.take(count)
            victims = self._removable(taken.victims)
        if taken.scan is not None:
            is_long = taken.scan.took_ns > _LONG_SCAN_NS
            if taken.scan.left < _LOW if is_long else not victims:
                self._used_up_ns = taken.scan.begun_ns
        return TakenVictims(victims, taken.scan)

    def _removable(self, victims: list[Victim]) -> list[Victim]:
        return [victim for victim in victims if victim.path not in self._unremovable]

    def _is_fresh(self) -> bool:
        scan = None if self._crashed else self._file.info()
        if scan is None or scan.left == 0:
            return False
        return 0 <= time.time_ns() - scan.begun_ns < _FRESH_NS

    def _is_our_turn(self) -> bool:
        """Wait for a list that is not used up, or for the right to make one; True is the right."""
        begun_s = time.monotonic()
        while not self._stopping.is_set():
            if self._has_new_list():
                return False
            if self._lock.acquire():
                if not self._has_new_list():
                    return True
                self._lock.release()
                return False
            share_s = _POLL_SHARE * (time.monotonic() - begun_s)
            self._stopping.wait(min(max(_POLL_S, share_s), _MOST_POLL_S))
        return False

    def _has_new_list(self) -> bool:
        scan = self._file.info()
        return scan is not None and scan.begun_ns != self._used_up_ns

    def _scan_and_publish(self) -> list[Victim]:
        """Scan, and share the list. Return the victims of a list that could not be shared."""
        begun_ns, begun_s = time.time_ns(), time.monotonic()
        oldest = self._scan()
        if self._stopping.is_set():
            return []
        took_ns = int((time.monotonic() - begun_s) * 1e9)
        pages = self._oldest_first(oldest)
        if self._file.publish(pages, begun_ns, took_ns, self._writer.temp_path()):
            return []
        return [Victim(*page) for page in self._oldest_first(oldest)]

    def _scan(self) -> list[bytes]:
        """Correct the ledger, collect dead writers, and return some of the oldest pages in any order."""
        self._counters.add("dead_writers", collect_dead(self._layout.writers))
        since = self._ledger.totals(Deadline(_LEDGER_WAIT_S))
        pending = total_pending_nbytes(self._layout.writers)
        totals = ScanTotals()
        oldest = self._oldest(self._stat_pages(self._layout.all_pages(), totals))
        if self._stopping.is_set():
            return []
        if not oldest and self._unremovable:  # there is nothing else; they may be removable by now
            self._unremovable.clear()
        pending += total_pending_nbytes(self._layout.writers)
        self._ledger.correct(totals.nbytes, pending, since, Deadline(_LEDGER_WAIT_S))
        self._keep = min(max(LEAST_LISTED, totals.pages // _LISTED_SHARE), MOST_LISTED)
        return oldest

    def _oldest(self, seen: Iterable[ScannedPage]) -> list[bytes]:
        """Return some of the oldest pages, packed. One large sort would stop all threads."""
        prefix = len(self._layout.spaces) + 1
        youngest_first: list[bytes] = []
        for number, (modified_ns, nbytes, path) in enumerate(seen):
            if not number % _PAGES_A_RENEWAL:
                self._lock.renew()
            age = (_MOST_NS - modified_ns).to_bytes(_AGE_NBYTES, "big")
            kept = age + nbytes.to_bytes(8, "big") + path[prefix:].encode("ascii")
            if len(youngest_first) < self._keep:
                heapq.heappush(youngest_first, kept)
            elif kept > youngest_first[0]:
                heapq.heapreplace(youngest_first, kept)
        return youngest_first

    def _oldest_first(self, kept: list[bytes]) -> Iterator[ScannedPage]:
        """Yield the pages in order. They are sorted in small parts: one sort would stop all threads."""
        runs = [
            sorted(kept[start : start + _SORTED_AT_ONCE], reverse=True)
            for start in range(0, len(kept), _SORTED_AT_ONCE)
        ]
        for one in heapq.merge(*runs, reverse=True):
            modified_ns = _MOST_NS - int.from_bytes(one[:_AGE_NBYTES], "big")
            nbytes = int.from_bytes(one[_AGE_NBYTES:_KEPT_NBYTES], "big")
            path = one[_KEPT_NBYTES:].decode("ascii")
            yield modified_ns, nbytes, f"{self._layout.spaces}/{path}"

    def _stat_pages(
        self, paths: Iterable[str], totals: ScanTotals, deadline_s: float = math.inf
    ) -> Iterator[ScannedPage]:
        """Yield the removable pages among `paths` by the deadline, and count all of them."""
        todo = iter(paths)
        while some := list(islice(todo, _PAGES_A_CALL)):
            if self._stopping.is_set():
                return
            found = native.stat_files([os.fsencode(path) for path in some], deadline_s)
            for path, verdict, modified_ns, nbytes in zip(some, *found, strict=True):
                if verdict != native.HIT:
                    continue
                totals.pages += 1
                totals.nbytes += nbytes
                if path not in self._unremovable:
                    yield modified_ns, nbytes, path
