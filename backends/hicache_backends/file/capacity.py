"""The capacity of a root: how much may be written, and which pages are evicted to make space.

Every byte is added to the ledger before it is written, so that all processes together never exceed
the capacity. To claim a victim, a process renames it into its own directory, which only one process
can do. It then overwrites the file there or unlinks it.

A writer stores the sum of its pending bytes in its own directory (`add_pending`): bytes that it was
granted but has not written, and bytes that it has claimed but not yet taken off the ledger. A sweep
takes them into account, and never makes the ledger lower than the truth. A thread sweeps when the
root is opened (unless another process has just begun to) and when the ledger was lost.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from hicache_backends.file.eviction import EvictionSweep
from hicache_backends.file.writer import total_pending_nbytes
from hicache_storage import native
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import refuse_link
from hicache_storage.settings import format_nbytes

if TYPE_CHECKING:
    from hicache_backends.file.clock import RootClock
    from hicache_backends.file.eviction import Victim
    from hicache_backends.file.layout import Layout
    from hicache_backends.file.ledger import Ledger
    from hicache_backends.file.settings import FileSettings
    from hicache_backends.file.writer import Writer
    from hicache_storage.backend_support.counters import Counters

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
# The ledger of a small root is correct before anything is written. For a large root we do not wait.
_FIRST_COUNT_S = 0.1
# Processes that start together share the count of the first one.
_FRESH_S = 60
# After an interrupt, pages are counted until the count is exact, but not for ever beside a busy engine.
_MOST_COUNTS = 8
_LEAST_PAUSE_S = 0.05
# The ledger is corrected this often if many processes evict, because then no single process sees all
# pages.
_RECOUNT_S = 3600
# If this many victims in a row cannot be claimed, the file system is failing, so stop trying.
_MOST_FAILURES = 16
_NOT_PERMITTED = frozenset({errno.EPERM, errno.EACCES})
_LEDGER_WAIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a file system the pages may use."""

    capacity_nbytes: int | None = None
    min_free_nbytes: int = 0
    recycle: bool = True
    """True: victims of the right size may be overwritten in place."""

    @classmethod
    def of(cls, settings: FileSettings, *, recycle: bool = True) -> Self:
        """Return the limits that a config sets."""
        return cls(
            capacity_nbytes=settings.capacity_nbytes,
            min_free_nbytes=settings.min_free_nbytes,
            recycle=recycle,
        )

    @property
    def evict(self) -> bool:
        """True if a capacity or a minimum of free space is set. Only then are pages evicted."""
        return self.capacity_nbytes is not None or self.min_free_nbytes > 0


@dataclass(slots=True)
class Grant:
    """Capacity for a number of pages, and claimed files that these pages may overwrite."""

    pages: int
    page_nbytes: int
    recyclable: list[str] = field(default_factory=list[str])
    files: list[str] = field(default_factory=list[str])
    """Every unpublished file that these pages may have used. An interrupt may leave some of them."""

    @property
    def nbytes(self) -> int:
        """The size of all page files of the grant together."""
        return self.pages * self.page_nbytes


class Capacity:
    """The capacity of one root, as one writer sees it. Thread-safe."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        writer: Writer,
        ledger: Ledger,
        counters: Counters,
        *,
        clock: RootClock,
        crashed: bool = False,
    ) -> None:
        self.limits = limits
        self._layout = layout
        self._writer = writer
        self._ledger = ledger
        self._counters = counters
        self._sweep = EvictionSweep(layout, ledger, clock, counters, turns=f"{layout.counted}/turn")
        # The counting thread has its own sweep, so that eviction does not wait if that sweep hangs.
        self._count_sweep = EvictionSweep(layout, ledger, clock, counters)
        self._counting: threading.Thread | None = None
        self._counting_lock = threading.Lock()
        self._sweeping = threading.Lock()
        self._grants: dict[int, Grant] = {}
        """The open grant of each thread that is storing pages."""
        self._doubts = self._settled_doubts = 0
        """How often an interrupt made the ledger doubtful, and how many of these a count has settled."""
        self._closed = False
        self._next_count_s = time.monotonic() + _RECOUNT_S
        self._failing = self._warned = False
        since = ledger.totals(_ledger_deadline())
        if ledger.needs_scan and layout.is_new():
            ledger.correct(0, 0, since, _ledger_deadline())
        if not ledger.needs_scan:
            self._warn_of_large_eviction()
        is_right = not (crashed or ledger.needs_scan) and self._was_just_counted(_FRESH_S)
        if limits.evict and (not is_right or self._is_over_capacity()):
            self._count().join(_FIRST_COUNT_S)
        elif ledger.needs_scan:
            self._count()

    def reserve(
        self, pages: int, page_nbytes: int, deadline: Deadline, *, is_full: bool = False
    ) -> Grant:
        """Return a grant of capacity for up to `pages` files of `page_nbytes` bytes.

        The caller ends the grant with `settle`, or with `abandon` after an interrupt. If the file
        system `is_full`, as many bytes are evicted, however much the capacity leaves.

        Eviction takes at most half of the remaining time, because the pages must still be written.
        """
        limit = Deadline(deadline.remaining_s() / 2)
        capacity = self.limits.capacity_nbytes
        most = pages if capacity is None else min(pages, capacity // page_nbytes)
        grant = Grant(most, page_nbytes)
        self._recover(deadline)
        if most:
            self._grants[threading.get_ident()] = grant
            is_added = False
            try:
                self._writer.add_pending(grant.nbytes, deadline)
                self._ledger.add(grant.nbytes, deadline)
                is_added = True
                granted = self._grantable_pages(grant, limit, is_full=is_full)
                grant.pages = granted
                if granted < most:
                    self._ledger.add(-(most - granted) * page_nbytes, deadline)
                    self._writer.add_pending(-(most - granted) * page_nbytes, deadline)
            except Exception:
                self.settle(grant, 0, deadline)
                raise
            except BaseException:
                self.abandon(0 if is_added and grant.pages == most else None, deadline)
                raise
        reason = "timeouts" if limit.passed() else "refused_no_space"
        self._counters.add(reason, pages - grant.pages)
        return grant

    def settle(self, grant: Grant, written: int, deadline: Deadline) -> None:
        """End a grant after `written` pages were stored. Give back the capacity of the rest."""
        for path in grant.recyclable:
            with suppress(OSError):
                os.unlink(path)
        if written:
            self._sweep.note_new_pages()
        self._ledger.add((written - grant.pages) * grant.page_nbytes, deadline)
        self._writer.add_pending(-grant.nbytes, deadline)
        self._grants.pop(threading.get_ident(), None)

    def abandon(self, most_written: int | None, deadline: Deadline) -> None:
        """End this thread's grant after an interrupt, and have the pages counted.

        Until then the ledger may be too high. Without `most_written`, an upper limit of the pages that
        were stored, it keeps all bytes of the grant.
        """
        self._doubts += 1  # first, because another interrupt may come
        thread = threading.get_ident()
        grant = self._grants.get(thread, Grant(0, 0))
        for path in grant.files:
            with suppress(OSError):
                os.unlink(path)
        if most_written is not None and self._grants.pop(thread, None) is not None:
            self._ledger.add((most_written - grant.pages) * grant.page_nbytes, deadline)
        self._writer.forget_pending(deadline)
        self._count()
        self._grants.pop(thread, None)

    @property
    def is_in_doubt(self) -> bool:
        """True if the ledger may be too high after an interrupt, because no count has ended since."""
        return self._settled_doubts != self._doubts or bool(self._grants)

    def remove(self, path: str, nbytes: int, deadline: Deadline) -> bool:
        """Unlink a page file that was granted `nbytes`. Return False if the file did not exist."""
        self._recover(deadline)
        self._writer.add_pending(nbytes, deadline)
        try:
            os.unlink(path)
            self._ledger.add(-nbytes, deadline)
        except FileNotFoundError:
            return False
        except OSError:
            raise
        except BaseException:
            self._doubts += 1
            raise
        finally:
            self._writer.add_pending(-nbytes, deadline)
        return True

    def release_replaced(self, nbytes: int, deadline: Deadline) -> None:
        """Take `nbytes` off the ledger: the size of page files that newly granted files replaced."""
        self._ledger.add(-nbytes, deadline)

    def close(self, deadline: Deadline) -> None:
        """Stop counting. Idempotent."""
        self._closed = True
        self._sweep.stop()
        self._count_sweep.stop()
        if self._counting is not None:
            self._counting.join(deadline.remaining_s())

    # --- parts -----------------------------------------------------------------------------------

    def _recover(self, deadline: Deadline) -> None:
        """End what this thread left open in an earlier call, because `settle` was interrupted too."""
        if threading.get_ident() in self._grants or self._writer.is_pending():
            self.abandon(None, deadline)
        elif self._settled_doubts != self._doubts:
            self._count()

    def _grantable_pages(self, grant: Grant, deadline: Deadline, *, is_full: bool) -> int:
        """Return how many pages of a grant fit, after eviction."""
        if self._ledger.needs_scan and not self._await_count(deadline):
            return 0
        lacking = self._evict_for(grant, deadline) if self.limits.evict else 0
        if is_full:
            self._evict((grant.pages - len(grant.recyclable)) * grant.page_nbytes, grant, deadline)
        return max(0, grant.pages + -lacking // grant.page_nbytes)

    def _await_count(self, deadline: Deadline) -> bool:
        """Wait until the used bytes are counted. Do not wait if there is no capacity limit."""
        self._layout.restore()
        counting = self._count()
        if self.limits.capacity_nbytes is None:
            return True
        counting.join(deadline.remaining_s())
        return not self._ledger.needs_scan

    def _evict_for(self, grant: Grant, deadline: Deadline) -> int:
        """Evict until the grant fits. Return how many bytes are still lacking."""
        if time.monotonic() > self._next_count_s:
            self._next_count_s = time.monotonic() + _RECOUNT_S
            if not self._was_just_counted(_RECOUNT_S):
                self._count()
        for attempt in range(_ATTEMPTS):  # a sweep in between may have corrected the ledger
            lacking = self._lacking_nbytes(grant)
            is_last = attempt == _ATTEMPTS - 1
            if lacking <= 0:
                return 0
            if self._evict(lacking, grant, deadline, past_sweeps=is_last) >= lacking:
                return 0
        lacking = min(max(0, self._lacking_nbytes(grant)), grant.nbytes)
        if lacking:
            self._layout.check_exists()  # raises if the root is missing rather than full
        return lacking

    def _lacking_nbytes(self, grant: Grant) -> int:
        """Return how many bytes to evict: this grant's part of the excess over the capacity."""
        wanted = grant.nbytes
        lacking = 0
        if self.limits.capacity_nbytes is not None:
            lacking = min(self._ledger.used - self.limits.capacity_nbytes, wanted)
        if self.limits.min_free_nbytes:
            new = wanted - len(grant.recyclable) * grant.page_nbytes
            lacking = max(lacking, self.limits.min_free_nbytes + new - self._free_nbytes())
        return lacking

    def _free_nbytes(self) -> int:
        status = os.statvfs(self._layout.root)
        return status.f_bavail * status.f_frsize

    def _evict(
        self, nbytes: int, grant: Grant, deadline: Deadline, *, past_sweeps: bool = True
    ) -> int:
        """Claim the oldest pages until `nbytes` are free or time is up.

        Return the bytes of all claimed pages.

        Without `past_sweeps`, stop after a sweep, because the sweep may have found free capacity.
        """
        freed = failures = 0
        sweeps = self._sweep.sweeps
        while freed < nbytes and failures < _MOST_FAILURES and not deadline.passed():
            victims = self._sweep.take(nbytes - freed, deadline)
            if not past_sweeps and sweeps != self._sweep.sweeps:
                self._sweep.put_back(victims, 0)
                break
            if not victims:
                break
            freed_now, failed = self._claim_counted(victims, grant, deadline)
            freed += freed_now
            failures = failures + failed if failed == len(victims) else 0
        return freed

    def _claim_counted(
        self, victims: list[Victim], grant: Grant, deadline: Deadline
    ) -> tuple[int, int]:
        """Claim pages and take them off the ledger.

        Return the freed bytes and the number of failed claims.
        """
        pending = sum(victim.nbytes for victim in victims)
        self._writer.add_pending(pending, deadline)
        freed = failed = 0
        try:
            for victim, verdict in zip(victims, self._claim(victims, grant, deadline), strict=True):
                freed += victim.nbytes if verdict in (native.HIT, native.KEPT) else 0
                failed += verdict < 0
        finally:
            self._ledger.add(-freed, deadline)
            self._writer.add_pending(-pending, deadline)
        return freed, failed

    def _claim(self, victims: list[Victim], grant: Grant, deadline: Deadline) -> list[int]:
        """Move pages out of their key spaces. Return the verdicts of `native.claim_files`.

        A page that this process may not remove is a MISS. A negative verdict is an error of the
        file system, which may be temporary.
        """
        targets = [self._writer.temp_path() for _ in victims]
        grant.files += targets
        verdicts = native.claim_files(
            [os.fsencode(victim.path) for victim in victims],
            [os.fsencode(target) for target in targets],
            [victim.modified_ns for victim in victims],
            [victim.nbytes for victim in victims],
            grant.page_nbytes,
            grant.pages - len(grant.recyclable) if self.limits.recycle else 0,
            deadline.end_s,
        )
        for index, (victim, target, verdict) in enumerate(
            zip(victims, targets, verdicts, strict=True)
        ):
            if verdict == native.KEPT:
                grant.recyclable.append(target)
            elif -verdict in _NOT_PERMITTED:
                self._counters.add("unremovable")
                self._sweep.skip(victim.path)
                verdicts[index] = native.MISS
            elif verdict < 0:
                logger.debug("%s cannot be evicted now: %s", victim.path, os.strerror(-verdict))
        late = [
            victim
            for victim, verdict in zip(victims, verdicts, strict=True)
            if verdict == native.LATE
        ]
        self._sweep.put_back(late, verdicts.count(native.MISS))
        self._counters.add("evicted", verdicts.count(native.HIT) + verdicts.count(native.KEPT))
        return verdicts

    # --- counts ----------------------------------------------------------------------------------

    def _was_just_counted(self, within_s: float) -> bool:
        """Return True if a process began a count within this time."""
        try:
            return 0 <= time.time() - os.lstat(self._layout.counted).st_mtime < within_s
        except OSError:
            return False

    def _count(self) -> threading.Thread:
        """Return the thread that counts the pages. Start it unless it is running."""
        with self._counting_lock:
            if self._counting is None or not self._counting.is_alive():
                thread = threading.Thread(
                    target=self._run_count, name="hicache-file-count", daemon=True
                )
                self._counting = thread
                try:
                    thread.start()  # this fails if no more threads can be started
                except RuntimeError:
                    self._counting = None
                    raise
            return self._counting

    def _run_count(self) -> None:
        with self._sweeping:
            doubts = self._doubts
            for pauses in range(_MOST_COUNTS):
                time.sleep(pauses * _LEAST_PAUSE_S)
                doubts = self._doubts
                self._count_once()
                if self._closed or self._failing:
                    return
                if self._count_sweep.is_exact or doubts == self._settled_doubts:
                    break
            self._settled_doubts = doubts

    def _count_once(self) -> None:
        try:
            with suppress(FileExistsError):
                os.mkdir(self._layout.counted)
            refuse_link(self._layout.counted)
            os.utime(self._layout.counted)
        except OSError as error:
            logger.debug("the time of a count cannot be shared: %s", error)
        try:
            self._sweep.add(self._count_sweep.sweep())
            self._warn_of_large_eviction()
            while self._is_over_capacity():
                victims = self._sweep.take(1, _ledger_deadline())
                if not victims:
                    break
                self._claim_counted(victims, Grant(0, 0), _ledger_deadline())
        except Exception as error:  # noqa: BLE001 - a thread has no caller for an error of a file system
            level = logging.DEBUG if self._failing else logging.WARNING
            logger.log(level, "the pages cannot be counted: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _is_over_capacity(self) -> bool:
        """Return True if the used bytes exceed the capacity, for example because it was lowered."""
        if self.limits.capacity_nbytes is None:
            return False
        used = self._ledger.totals(_ledger_deadline()).used
        if used <= self.limits.capacity_nbytes or self._closed:
            return False
        return used - total_pending_nbytes(self._layout.writers) > self.limits.capacity_nbytes

    def _warn_of_large_eviction(self) -> None:
        """Warn once if more than half of the pages exceed the capacity, because it may be mistyped."""
        capacity, used = self.limits.capacity_nbytes, self._ledger.used
        if capacity is not None and used > 2 * capacity and not self._warned:
            logger.warning(
                "file: the pages in %s take %s, but capacity_nbytes is %s: more than half of them"
                " will be evicted",
                self._layout.root,
                format_nbytes(used),
                format_nbytes(capacity),
            )
        self._warned = True


def _ledger_deadline() -> Deadline:
    """Return the deadline of a step that no caller waits for."""
    return Deadline(_LEDGER_WAIT_S)
