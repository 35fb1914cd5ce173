"""The ledger: how many bytes all pages of a root take. All processes that use the root share it.

The file holds two counters: the bytes ever added and the bytes ever removed. Both only grow, so
that a scan of the directory, which takes seconds, can account for changes made while it ran. A
writer adds bytes before it writes them and removes bytes after it has unlinked them. So if a
process dies in between, the sum is too high, never too low.

No caller waits for the file beyond its deadline. A change that could not be written is kept in
memory and written with the next one.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage import native
from hicache_storage.backend_support.filesystem import open_own, read_own
from hicache_storage.backend_support.interrupts import held
from hicache_storage.backend_support.writer_lock import lock_file, unlock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.backend_support.deadline import Deadline

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<QQ")
_MOST_PLAUSIBLE = 1 << 62
# The lock is held for microseconds. It guards a sum, not pages, so going on without it costs only
# accuracy. If a process was stopped while it held the lock, we wait for it once, not in every call.
_WAIT_S = 1.0
_LEAST_WAIT_S = 0.01
_STOPPED_HOLDER_WAIT_S = 0.001
_REMEMBERED_S = 30.0
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})


class NotALedger(OSError):
    """The file at the ledger's path belongs to another program, and is not changed."""


class Totals(NamedTuple):
    """The bytes that were added and removed since the ledger was made."""

    added: int
    removed: int

    @property
    def used(self) -> int:
        """The bytes that are stored now."""
        return self.added - self.removed


_NOTHING = Totals(0, 0)


class Ledger:
    """The used bytes of one root. Thread-safe; nothing is written after `close`.

    `pending_nbytes` returns the bytes that this process has added but not written yet. If another
    program removes the file and a new one takes its place, these bytes are added to the new file.

    Raises:
        NotALedger: The file at `path` belongs to another program.
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str, pending_nbytes: Callable[[], int] = lambda: 0) -> None:
        self._path = path
        self._pending_nbytes = pending_nbytes
        self._lock = threading.RLock()
        self._unwritten: deque[Totals] = deque()
        """Changes that are not in the file yet."""
        self._stored: Totals | None = None
        self._waited_s = self._busy_until_s = 0.0
        self._warned = False
        self._fd = _open_ledger(path)
        found = self._read()
        self._known = found or _NOTHING
        self.needs_scan = found is None
        """True while the file is new or damaged. Before it is written, a scan counts the used bytes."""

    @property
    def used(self) -> int:
        """The used bytes, as this process last saw them. No I/O."""
        return self._known.used + sum(change.used for change in list(self._unwritten))

    def totals(self, deadline: Deadline) -> Totals:
        """Read both counters from the file."""
        self._change(_NOTHING, deadline)
        return self._known

    def add(self, nbytes: int, deadline: Deadline) -> None:
        """Add bytes, or remove them if `nbytes` is negative."""
        if nbytes:
            self._change(Totals(max(nbytes, 0), max(-nbytes, 0)), deadline)

    def correct(self, found: int, pending: int, since: Totals, deadline: Deadline) -> bool:
        """Correct the used bytes after a scan, but only as far as the scan proves them wrong.

        We cannot know whether the scan saw a change that was made while it ran. A ledger that
        needed the scan gets the highest sum that is possible. Return True if nothing was changed
        meanwhile, so that the sum is exact.

        Args:
            found: The bytes of the pages that the scan saw.
            pending: The pending bytes of all writers when the scan began.
            since: The counters when the scan began.
            deadline: The limit of the wait for the file.
        """
        with self._exclusive(deadline) as may_write:
            if not may_write:
                return False
            now = self._current()
            least = found - max(0, now.removed - since.removed)
            most = found + pending + max(0, now.added - since.added)
            wanted = most if self.needs_scan else min(max(now.used, least), most)
            self.needs_scan = False
            change = Totals(max(wanted - now.used, 0), max(now.used - wanted, 0))
            self._write(_changed(now, change))
            return not pending and now == since

    def close(self) -> None:
        """Stop writing. Idempotent."""
        with held(self._lock, _WAIT_S) as is_held:
            if is_held:
                self.abandon()

    def abandon(self) -> None:
        """Close the ledger in a forked child. Take no lock: its holder may be a thread of the parent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _change(self, change: Totals, deadline: Deadline) -> None:
        self._unwritten.append(change)
        if self._change_at_once():
            return
        with self._exclusive(deadline) as may_write:
            if may_write:
                self._write(self._current())

    def _change_at_once(self) -> bool:
        """Write all unwritten changes in one call of the data plane.

        Return False if another thread or process holds a lock, or if the file is missing or
        damaged.
        """
        with held(self._lock, 0) as is_held:
            if not is_held or self._fd < 0 or self.needs_scan or self._waited_s:
                return False
            changes = list(self._unwritten)
            verdict, *totals = native.change_totals(
                self._fd,
                sum(change.added for change in changes),
                sum(change.removed for change in changes),
                _LEAST_WAIT_S,
            )
            if verdict != native.HIT:
                return False
            for _ in changes:
                self._unwritten.popleft()
            self._known = self._stored = Totals(*totals)
            return True

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Generator[bool]:
        """Keep other threads and processes out. Yield False if that is not possible in time.

        The lock of a stopped process is ignored. Then the used bytes may be wrong until the next
        scan.
        """
        with held(self._lock, max(deadline.remaining_s(), _LEAST_WAIT_S)) as is_held:
            if not is_held:
                yield False
                return
            self._reopen_lost()
            locked = self._fd >= 0 and self._lock_file(deadline)
            try:
                yield locked or self._fd < 0 or self._holder_is_stopped
            finally:
                if locked:
                    unlock_file(self._fd)

    def _lock_file(self, deadline: Deadline) -> bool:
        """Lock the file.

        Return False after the deadline, or when we have waited long enough for the process that
        holds the lock.
        """
        begun_s = time.monotonic()
        if begun_s > self._busy_until_s:
            self._waited_s = 0.0
        limit_s = min(_WAIT_S - self._waited_s, deadline.remaining_s())
        least_s = _STOPPED_HOLDER_WAIT_S if self._holder_is_stopped else _LEAST_WAIT_S
        locked = lock_file(self._fd, max(least_s, limit_s))
        now_s = time.monotonic()
        self._waited_s = 0.0 if locked else self._waited_s + now_s - begun_s
        self._busy_until_s = now_s + _REMEMBERED_S
        return locked

    @property
    def _holder_is_stopped(self) -> bool:
        """True if we have waited for the lock so long that its holder must be a stopped process."""
        return self._waited_s >= _WAIT_S

    def _reopen_lost(self) -> None:
        """If the file was removed, open the one that has replaced it."""
        if self._fd < 0 or not _is_lost(self._fd):
            return
        try:
            fd = _open_ledger(self._path)
        except OSError as error:
            logger.debug("the ledger was removed, and there is no other: %s", error)
            return
        os.close(self._fd)
        self._fd = fd
        found = self._read()
        self.needs_scan = found is None
        self._known = found or _NOTHING
        self._unwritten.appendleft(Totals(self._pending_nbytes(), 0))

    def _current(self) -> Totals:
        """Return the totals in the file plus all unwritten changes."""
        totals = self._read()
        if totals is None:
            totals = self._known
        elif self.needs_scan:  # another process has scanned, and may not have seen our changes
            totals = _changed(totals, self._known)
            self.needs_scan = False
        while self._unwritten:
            totals = _changed(totals, self._unwritten.popleft())
        return totals

    def _read(self) -> Totals | None:
        if self._fd < 0:
            return self._known
        try:
            record = os.pread(self._fd, _RECORD.size + 1, 0)
        except OSError as error:
            logger.debug("the used bytes cannot be read: %s", error)
            return None
        self._stored = _parse(record)
        return self._stored

    def _write(self, totals: Totals) -> None:
        self._known = totals
        if self._fd < 0 or self.needs_scan or totals == self._stored:
            return
        try:
            if self._stored is None:  # so that no other process takes the file for a foreign one
                os.ftruncate(self._fd, _RECORD.size)
            os.pwrite(self._fd, _RECORD.pack(*totals), 0)
        except OSError as error:
            if not self._warned:
                logger.warning("the used bytes cannot be recorded: %s", error)
            self._warned = True
        else:
            self._warned = False


def read_used(path: str) -> int | None:
    """Return the used bytes according to the ledger at `path`, or None if it is missing or damaged."""
    try:
        totals = _parse(read_own(path, _RECORD.size + 1))
    except OSError:
        return None
    return None if totals is None else totals.used


def _parse(record: bytes) -> Totals | None:
    totals = Totals(*_RECORD.unpack(record)) if len(record) == _RECORD.size else _NOTHING
    # Zeros prove nothing: a process may have been killed between the two steps of its first write.
    plausible = totals != _NOTHING and totals.removed <= totals.added <= _MOST_PLAUSIBLE
    return totals if plausible else None


def _changed(totals: Totals, change: Totals) -> Totals:
    """Add `change` to `totals`. Never count more bytes as removed than were added."""
    added = totals.added + change.added
    return Totals(added, min(totals.removed + change.removed, added))


def _open_ledger(path: str) -> int:
    """Open a ledger. The file must be empty or have the size of a ledger."""
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotALedger(error.errno, f"{path} is not a regular file") from error
        raise
    nbytes = os.fstat(fd).st_size
    if nbytes not in (0, _RECORD.size):
        os.close(fd)
        raise NotALedger(0, f"{path} is {nbytes:,} bytes long, but a ledger has {_RECORD.size}")
    return fd


def _is_lost(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:  # ESTALE: another client of a network file system has removed it
        return True
