"""Looking at all pages of a root: what they take, and which are the oldest.

One process surveys, and the others take from its list (`_victims_file`). Whoever cannot wait for a
survey evicts the oldest of a sample: pages are spread over their directories by hash, so that a
directory of each key space is as good a sample as any.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.file.layout import FANS
from hicache_backends.file.victims_file import PageFile, Share, SurveyLock, Victim, VictimsFile
from hicache_backends.file.writer import collect_dead, pending_nbytes
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from hicache_backends.file.layout import Layout
    from hicache_backends.file.ledger import Ledger
    from hicache_backends.file.writer import Writer
    from hicache_storage.backend_support.counters import Counters

# A survey keeps the oldest eighth within these bounds: few surveys, and some 15 MB at most.
LEAST_LISTED = 1 << 16
MOST_LISTED = 1 << 17
_LISTED_SHARE = 8
_LEAST_SAMPLE = 64
_MOST_SAMPLE = 1 << 10
_SORTED_AT_ONCE = 1 << 11
_MOST_STUCK = 1 << 16
# Processes that start together share the survey of the first.
_FRESH_NS = 60 * 10**9
# A long survey begins while a quarter of the list is left. A short one is made when the list is used up.
_LOW = 0.25
_LONG_SURVEY_NS = 50 * 10**6
_PAGES_A_BEAT = 1 << 10
# While another surveys: seldom in a long survey, whose followers are many and their file system far.
_LOOK_S = 0.01
_LOOK_SHARE = 0.1
_MOST_LOOK_S = 0.5
_LEDGER_PATIENCE_S = 1.0


@dataclass(slots=True)
class CapacityScan:
    """What a survey counted."""

    pages: int = 0
    nbytes: int = 0


class CapacityScanner:
    """The surveys of one root, as one process makes or awaits them.

    `refreshed` is for one thread; everything else is thread-safe. `crashed`: writers have died, so that
    the ledger may be too high.
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
        self._lock = SurveyLock(layout)
        self._stopping = threading.Event()
        self._stuck: set[str] = set()
        self._keep = LEAST_LISTED
        self._spent_ns: int | None = None
        self._first = True

    def refreshed(self) -> list[Victim]:
        """The first of a new list of victims: this process's own, or another's."""
        asked_ns = time.time_ns()
        if self._ledger.doubtful or (self._first and not self._is_fresh()):
            survey = self._file.survey()
            self._spent_ns = survey.begun_ns if survey else None
        self._first = False
        while not self._stopping.is_set():
            is_ours = self._is_our_turn()
            if is_ours:
                try:
                    private = self._surveyed()
                finally:
                    self._lock.release()
                if private:
                    return private
            victims, survey = self._take()
            knows_all = is_ours or survey is None or survey.begun_ns >= asked_ns
            if victims or survey is None or (survey.is_empty and knows_all):
                self._ledger.totals(Deadline(_LEDGER_PATIENCE_S))
                return victims
        return []

    def taken(self) -> tuple[list[Victim], bool]:
        """The next victims of the list, and whether a new list is needed soon."""
        victims, survey = self._take()
        return victims, survey is not None and survey.begun_ns == self._spent_ns

    def _take(self) -> Share:
        """Take victims that this process may remove; note when the list runs low."""
        share = self._file.take()
        victims = self._removable(share.victims)
        while share.victims and not victims:
            share = self._file.take()
            victims = self._removable(share.victims)
        if share.survey is not None:
            is_long = share.survey.took_ns > _LONG_SURVEY_NS
            if share.survey.left < _LOW if is_long else not victims:
                self._spent_ns = share.survey.begun_ns
        return Share(victims, share.survey)

    def _removable(self, victims: list[Victim]) -> list[Victim]:
        return [one for one in victims if one.path not in self._stuck]

    def sample(self, deadline: Deadline) -> list[Victim]:
        """Return the oldest of some pages, of fewer where the file system is slow."""
        patience = Deadline(deadline.remaining_s() / 2)  # they are still to be evicted
        seen: list[PageFile] = []
        start = random.randrange(len(FANS))
        for fan in FANS[start:] + FANS[:start]:
            entries = list(self._layout.pages_in(fan))
            some = random.sample(entries, min(len(entries), _MOST_SAMPLE))
            for one in self._seen(some, CapacityScan()):
                seen.append(one)
                if patience.passed():
                    break
            if len(seen) >= _LEAST_SAMPLE or patience.passed():
                break
        seen.sort()
        return [Victim(*one) for one in seen[: len(seen) // _LISTED_SHARE + 1]]

    def pass_over(self, path: str) -> None:
        """Leave out a page that this process may not remove."""
        if len(self._stuck) < _MOST_STUCK:
            self._stuck.add(path)

    def stop(self) -> None:
        """End a running survey soon."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def forget(self) -> None:
        """Let go in a forked child."""
        self._lock.forget()

    def _is_fresh(self) -> bool:
        survey = None if self._crashed else self._file.survey()
        if survey is None or survey.left == 0:
            return False
        return 0 <= time.time_ns() - survey.begun_ns < _FRESH_NS

    def _is_our_turn(self) -> bool:
        """Wait until there is another list than the one that is used up, or the right to make it."""
        begun_s = time.monotonic()
        while not self._stopping.is_set():
            if self._has_other_list():
                return False
            if self._lock.acquire():
                if not self._has_other_list():
                    return True
                self._lock.release()
                return False
            share_s = _LOOK_SHARE * (time.monotonic() - begun_s)
            self._stopping.wait(min(max(_LOOK_S, share_s), _MOST_LOOK_S))
        return False

    def _has_other_list(self) -> bool:
        survey = self._file.survey()
        return survey is not None and survey.begun_ns != self._spent_ns

    def _surveyed(self) -> list[Victim]:
        """Survey, and share the list; what could not be shared is returned."""
        begun_ns, begun_s = time.time_ns(), time.monotonic()
        oldest = self._survey()
        if self._stopping.is_set():
            return []
        took_ns = int((time.monotonic() - begun_s) * 1e9)
        if self._file.publish(_oldest_first(oldest), begun_ns, took_ns, self._writer.temp_path()):
            return []
        return [Victim(*one) for one in _oldest_first(oldest)]

    def _survey(self) -> list[PageFile]:
        """Put the ledger right, and collect dead writers; some of the oldest pages, in any order."""
        self._counters.add("dead_writers", collect_dead(self._layout.writers))
        since = self._ledger.totals(Deadline(_LEDGER_PATIENCE_S))
        pending = pending_nbytes(self._layout.writers)
        census = CapacityScan()
        oldest = self._oldest(self._seen(self._layout.all_pages(), census))
        if self._stopping.is_set():
            return []
        if not oldest and self._stuck:  # there is nothing else: perhaps they can be removed by now
            self._stuck.clear()
        pending += pending_nbytes(self._layout.writers)
        self._ledger.settle(census.nbytes, pending, since, Deadline(_LEDGER_PATIENCE_S))
        self._keep = min(max(LEAST_LISTED, census.pages // _LISTED_SHARE), MOST_LISTED)
        return oldest

    def _oldest(self, seen: Iterable[PageFile]) -> list[PageFile]:
        """Some of the oldest pages. Nothing large is sorted: that would stop all threads for long."""
        youngest_first: list[PageFile] = []  # their times are negative: a heap's first is its least
        for number, (modified_ns, nbytes, path) in enumerate(seen):
            if not number % _PAGES_A_BEAT:
                self._lock.beat()
            if len(youngest_first) < self._keep:
                heapq.heappush(youngest_first, (-modified_ns, nbytes, path))
            elif -modified_ns > youngest_first[0][0]:
                heapq.heapreplace(youngest_first, (-modified_ns, nbytes, path))
        return [(-negative_ns, nbytes, path) for negative_ns, nbytes, path in youngest_first]

    def _seen(
        self, entries: Iterable[os.DirEntry[str]], census: CapacityScan
    ) -> Iterator[PageFile]:
        for entry in entries:
            if self._stopping.is_set():
                return
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            census.pages += 1
            census.nbytes += status.st_size
            if entry.path not in self._stuck:
                yield status.st_mtime_ns, status.st_size, entry.path


def _oldest_first(victims: list[PageFile]) -> Iterable[PageFile]:
    """In order, a little at a time: one sort of all would stop all threads for long."""
    runs = [
        sorted(victims[start : start + _SORTED_AT_ONCE])
        for start in range(0, len(victims), _SORTED_AT_ONCE)
    ]
    return runs[0] if len(runs) == 1 else heapq.merge(*runs)
