"""Capacity for new pages: what may be written, and which pages go to make place for it.

Every byte is added to the ledger before it is written, so that no number of processes exceeds the
capacity together. Victims are claimed by renaming them into the claimer's own directory, which only one
process can do, and are overwritten there or unlinked.

What a writer was promised, and what it has claimed and not yet taken off the ledger, is noted in its own
directory (`pend`): a survey allows for it, and never makes the ledger lower than the truth.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file.capacity_scan import CapacityScanner
from hicache_backends.file.victims import Victim, Victims
from hicache_backends.file.writer import pending_nbytes
from hicache_storage.backend_support.deadline import Deadline

if TYPE_CHECKING:
    from hicache_backends.file.layout import Layout
    from hicache_backends.file.ledger import Ledger
    from hicache_backends.file.writer import Writer
    from hicache_storage.backend_support.counters import Counters

logger = logging.getLogger(__name__)

_LOOKS = 2
# Small roots are put right before anything is written. Opening a large one does not wait for that.
_FIRST_SURVEY_S = 0.1
# Trouble with as many victims in turn is trouble with the file system: the rest fares no better now.
_MOST_FAILURES = 16
_LEDGER_PATIENCE_S = 1.0


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
    """Capacity for a number of pages, and files that may become some of them."""

    pages: int
    page_nbytes: int
    spares: list[str] = field(default_factory=list[str])


class Capacity:
    """The room under one root, as one writer sees it. Thread-safe."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        writer: Writer,
        ledger: Ledger,
        counters: Counters,
        *,
        crashed: bool = False,
    ) -> None:
        self.limits = limits
        self._layout = layout
        self._writer = writer
        self._ledger = ledger
        self._counters = counters
        self._surveyor = CapacityScanner(layout, writer, ledger, counters, crashed=crashed)
        self._victims = Victims(self._refreshed, self._surveyor.taken, self._surveyor.sample)
        self._warned = False
        since = ledger.totals(_briefly())
        if ledger.doubtful and layout.is_new():
            ledger.settle(0, 0, since, _briefly())
        if not ledger.doubtful:
            self._warn_of_wholesale_eviction()
        if limits.evict:
            self._victims.await_survey(self._victims.want(), _FIRST_SURVEY_S)
        elif ledger.doubtful:
            self._victims.want()

    def reserve(self, pages: int, page_nbytes: int, deadline: Deadline) -> Grant:
        """Capacity for up to `pages` files of `page_nbytes`. `settle` ends it, whatever was written.

        It is made in half the time that is left: what has room is still to be written.
        """
        patience = Deadline(deadline.remaining_s() / 2)
        capacity = self.limits.capacity_nbytes
        most = pages if capacity is None else min(pages, capacity // page_nbytes)
        grant = Grant(most, page_nbytes)
        if most:
            self._writer.pend(most * page_nbytes, deadline)
            self._ledger.add(most * page_nbytes, deadline)
            try:
                granted = self._granted(grant, patience)
            except BaseException:
                self.settle(grant, 0, deadline)
                raise
            grant.pages = granted
            self._give_back((most - granted) * page_nbytes, deadline)
        reason = "timeouts" if patience.passed() else "refused_no_space"
        self._counters.add(reason, pages - grant.pages)
        return grant

    def settle(self, grant: Grant, written: int, deadline: Deadline) -> None:
        """The end of a grant: `written` pages are in place, the rest of the room is given back."""
        for path in grant.spares:
            with suppress(OSError):
                os.unlink(path)
        if written:
            self._victims.added()
            self._writer.pend(-written * grant.page_nbytes, deadline)
        self._give_back((grant.pages - written) * grant.page_nbytes, deadline)

    def remove(self, path: str, nbytes: int, deadline: Deadline) -> bool:
        """Unlink a page file that was granted `nbytes`; False where there was none."""
        self._writer.pend(nbytes, deadline)
        try:
            os.unlink(path)
            self._ledger.add(-nbytes, deadline)
        except FileNotFoundError:
            return False
        finally:
            self._writer.pend(-nbytes, deadline)
        return True

    def replaced(self, nbytes: int, deadline: Deadline) -> None:
        """Page files of `nbytes` in all were replaced by others, which have been granted room."""
        self._ledger.add(-nbytes, deadline)

    def relieve(self, nbytes: int, deadline: Deadline) -> None:
        """Evict `nbytes` after the file system was found full, so that the next batch fits."""
        if self.limits.evict:
            self._evict(nbytes, Grant(0, 0), deadline)

    def close(self, deadline: Deadline) -> None:
        """End the survey. Idempotent."""
        self._surveyor.stop()
        self._victims.close(deadline)

    def forget(self) -> None:
        """Let go in a forked child."""
        self._surveyor.forget()

    def _give_back(self, nbytes: int, deadline: Deadline) -> None:
        if nbytes:
            self._ledger.add(-nbytes, deadline)
            self._writer.pend(-nbytes, deadline)

    def _granted(self, grant: Grant, deadline: Deadline) -> int:
        """How many of a grant's pages there is room for, or can be made."""
        if self._ledger.doubtful and not self._is_counted(deadline):
            return 0
        lacking = self._make_room(grant, deadline) if self.limits.evict else 0
        return max(0, grant.pages + -lacking // grant.page_nbytes)

    def _is_counted(self, deadline: Deadline) -> bool:
        """Wait for a survey that tells what is used. Without a capacity nobody needs to know."""
        self._layout.remake()
        self._victims.want()
        if self.limits.capacity_nbytes is None:
            return True
        self._victims.await_count(lambda: not self._ledger.doubtful, deadline.remaining_s())
        return not self._ledger.doubtful

    def _make_room(self, grant: Grant, deadline: Deadline) -> int:
        """Evict until the grant fits; the bytes by which it still does not."""
        for look in range(_LOOKS):  # a survey in between may have put the ledger right
            lacking = self._short(grant)
            is_last = look == _LOOKS - 1
            if lacking <= 0 or self._evict(lacking, grant, deadline, resolute=is_last) >= lacking:
                return 0
        lacking = min(max(0, self._short(grant)), grant.pages * grant.page_nbytes)
        if lacking:
            self._layout.check_there()  # a directory that is gone is not full
        return lacking

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

    def _evict(
        self, nbytes: int, grant: Grant, deadline: Deadline, *, resolute: bool = True
    ) -> int:
        """Claim the oldest pages until `nbytes` are free, or time is up; tell the ledger how many are.

        Unless it is resolute it stops after a survey: there may be room by what that found.
        """
        freed = pended = failures = 0
        surveys = self._victims.surveys
        try:
            while freed < nbytes and failures < _MOST_FAILURES and not deadline.passed():
                victim = self._victims.next(deadline)
                if victim is None:
                    break
                if not resolute and surveys != self._victims.surveys:
                    self._victims.put_back(victim)
                    break
                if pended < freed + victim.nbytes:
                    more = max(nbytes, freed + victim.nbytes) - pended
                    self._writer.pend(more, deadline)
                    pended += more
                try:
                    claimed = self._claim(victim, grant)
                except OSError as error:
                    logger.debug("a page cannot be evicted now: %s", error)
                    failures += 1
                else:
                    freed += victim.nbytes if claimed else 0
                    failures = 0
        finally:
            self._ledger.add(-freed, deadline)
            self._writer.pend(-pended, deadline)
        return freed

    def _claim(self, victim: Victim, grant: Grant) -> bool:
        """Take a page out of its key space; False where it is gone, in use again, or not ours to move.

        Raises:
            OSError: The file system is in trouble, which may pass.
        """
        path = self._writer.temp_path()
        try:
            status = os.stat(victim.path, follow_symlinks=False)
            if (status.st_mtime_ns, status.st_size) != (victim.modified_ns, victim.nbytes):
                return False
            os.rename(victim.path, path)
        except FileNotFoundError:
            return False
        except PermissionError as error:
            logger.debug("a page cannot be evicted: %s", error)
            self._counters.add("unremovable")
            self._surveyor.pass_over(victim.path)
            return False
        self._counters.add("evicted")
        fits = self.limits.recycle and victim.nbytes == grant.page_nbytes and status.st_nlink == 1
        if fits and len(grant.spares) < grant.pages:
            grant.spares.append(path)
        else:
            with suppress(OSError):
                os.unlink(path)
        return True

    # --- in the thread of the survey --------------------------------------------------------------

    def _refreshed(self) -> list[Victim]:
        """Victims from a new survey, once the capacity holds."""
        victims = deque(self._surveyor.refreshed())
        self._warn_of_wholesale_eviction()
        while self._is_over_capacity():
            victims = victims or deque(self._surveyor.taken()[0])
            if not victims:
                break
            self._evict_one(victims.popleft())
        return list(victims)

    def _is_over_capacity(self) -> bool:
        """Whether a capacity was lowered, or filled behind the ledger's back."""
        if self.limits.capacity_nbytes is None:
            return False
        used = self._ledger.totals(_briefly()).used
        if used <= self.limits.capacity_nbytes or self._surveyor.stopping:
            return False
        return used - pending_nbytes(self._layout.writers) > self.limits.capacity_nbytes

    def _evict_one(self, victim: Victim) -> None:
        deadline = _briefly()
        self._writer.pend(victim.nbytes, deadline)
        try:
            if self._claim(victim, Grant(0, 0)):
                self._ledger.add(-victim.nbytes, deadline)
        finally:
            self._writer.pend(-victim.nbytes, deadline)

    def _warn_of_wholesale_eviction(self) -> None:
        """Say so, once, where a capacity costs more than half of what is there: it may be mistyped."""
        capacity, used = self.limits.capacity_nbytes, self._ledger.used
        if capacity is not None and used > 2 * capacity and not self._warned:
            logger.warning(
                "file: the pages in %s take %d bytes and capacity_nbytes is %d:"
                " more than half of them will be evicted",
                self._layout.root,
                used,
                capacity,
            )
        self._warned = True


def _briefly() -> Deadline:
    """The deadline of a change that no caller waits for."""
    return Deadline(_LEDGER_PATIENCE_S)
