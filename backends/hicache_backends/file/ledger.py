"""How many bytes the pages of a root take, agreed on by all processes that use it.

The file holds two counters, bytes ever added and bytes ever removed. Both only grow, so that a survey of
the directory that takes seconds can tell what happened meanwhile. A writer adds before it writes and
removes after it has unlinked: whoever dies in between leaves the sum too high, never too low.

No caller waits for the file longer than its deadline: a change that could not be written down is kept,
and goes with the next one.
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

from hicache_backends.file.descriptors import lock_file, open_own, unlock_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.backend_support.deadline import Deadline

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<QQ")
_MOST_PLAUSIBLE = 1 << 62
# The lock is held for microseconds. It guards a sum, not pages: going on without it costs accuracy only.
# Whoever was stopped while it held the lock is waited for once, not by every call.
_PATIENCE_S = 1.0
_LEAST_PATIENCE_S = 0.01
_FROZEN_PATIENCE_S = 0.001
_REMEMBERED_S = 30.0
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO})


class NotALedger(OSError):
    """What lies in the ledger's place is somebody else's. It is left as it is."""


class Totals(NamedTuple):
    """Bytes since the ledger was begun."""

    added: int
    removed: int

    @property
    def used(self) -> int:
        """Bytes that are there now."""
        return self.added - self.removed


_NOTHING = Totals(0, 0)


class Ledger:
    """The used bytes of one root. Thread-safe; after `close` nothing is written any more.

    `promised` tells the bytes that this process has added and has not written yet: they are carried over
    where the file was removed behind our back and another one has taken its place.

    Raises:
        NotALedger: The file at `path` is another program's.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str, promised: Callable[[], int] = lambda: 0) -> None:
        self._path = path
        self._promised = promised
        self._lock = threading.Lock()
        self._owed: deque[Totals] = deque()
        self._stored: Totals | None = None
        self._waited_s = self._busy_until_s = 0.0
        self._warned = False
        self._fd = _opened(path)
        found = self._read()
        self._known = found or _NOTHING
        self.doubtful = found is None
        """The file was new, or damaged: a survey must tell what is used. Nothing is written before."""

    @property
    def used(self) -> int:
        """The sum as this process last saw it. No I/O."""
        return self._known.used + sum(change.used for change in list(self._owed))

    def totals(self, deadline: Deadline) -> Totals:
        """Return both counters, from the file."""
        self._change(_NOTHING, deadline)
        return self._known

    def add(self, nbytes: int, deadline: Deadline) -> None:
        """Add bytes, or remove them where `nbytes` is negative."""
        if nbytes:
            self._change(Totals(max(nbytes, 0), max(-nbytes, 0)), deadline)

    def settle(self, found: int, pending: int, since: Totals, deadline: Deadline) -> None:
        """Put the sum right after a survey.

        `found` bytes of pages were seen; `pending` bytes were promised to writers when it began, at
        `since`. What came and went meanwhile may or may not have been seen: the sum is moved no further
        than the survey proves. Where nothing was known before, it becomes the most that there can be.
        """
        with self._exclusive(deadline) as alone:
            if not alone:
                return
            now = self._current()
            least = found - max(0, now.removed - since.removed)
            most = found + pending + max(0, now.added - since.added)
            wanted = most if self.doubtful else min(max(now.used, least), most)
            self.doubtful = False
            more = Totals(max(wanted - now.used, 0), max(now.used - wanted, 0))
            self._write(_moved(now, more))

    def close(self) -> None:
        """Write no more. Idempotent."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Close in a forked child. Takes no lock: the thread that held it may not exist here."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _change(self, change: Totals, deadline: Deadline) -> None:
        self._owed.append(change)
        with self._exclusive(deadline) as alone:
            if alone:
                self._write(self._current())

    @contextmanager
    def _exclusive(self, deadline: Deadline) -> Generator[bool]:
        """Be alone among threads and processes; False where the others are not done in time.

        A process that was stopped while it held the lock is passed over. The sum may then be off
        until a survey.
        """
        if not self._lock.acquire(timeout=max(deadline.remaining_s(), _LEAST_PATIENCE_S)):
            yield False
            return
        try:
            self._reopen_lost()
            locked = self._fd >= 0 and self._locked(deadline)
            try:
                yield locked or self._fd < 0 or self._is_frozen
            finally:
                if locked:
                    unlock_file(self._fd)
        finally:
            self._lock.release()

    def _locked(self, deadline: Deadline) -> bool:
        """Lock the file; False where the deadline, or all patience with its holder, is at an end."""
        begun_s = time.monotonic()
        if begun_s > self._busy_until_s:
            self._waited_s = 0.0
        patience_s = min(_PATIENCE_S - self._waited_s, deadline.remaining_s())
        least_s = _FROZEN_PATIENCE_S if self._is_frozen else _LEAST_PATIENCE_S
        locked = lock_file(self._fd, max(least_s, patience_s))
        now_s = time.monotonic()
        self._waited_s = 0.0 if locked else self._waited_s + now_s - begun_s
        self._busy_until_s = now_s + _REMEMBERED_S
        return locked

    @property
    def _is_frozen(self) -> bool:
        """Whether the file's holder was waited for so long, in all, that it must have been stopped."""
        return self._waited_s >= _PATIENCE_S

    def _reopen_lost(self) -> None:
        """Open the file that has taken the place of one that was removed."""
        if self._fd < 0 or not _is_lost(self._fd):
            return
        try:
            fd = _opened(self._path)
        except OSError as error:
            logger.debug("the ledger was removed, and there is no other: %s", error)
            return
        os.close(self._fd)
        self._fd = fd
        found = self._read()
        self.doubtful = found is None
        self._known = found or _NOTHING
        self._owed.appendleft(Totals(self._promised(), 0))

    def _current(self) -> Totals:
        """The totals as they are, with all changes that are owed."""
        totals = self._read()
        if totals is None:
            totals = self._known
        elif self.doubtful:  # another process has surveyed, and may not have seen what we changed
            totals = _moved(totals, self._known)
            self.doubtful = False
        while self._owed:
            totals = _moved(totals, self._owed.popleft())
        return totals

    def _read(self) -> Totals | None:
        if self._fd < 0:
            return self._known
        try:
            record = os.pread(self._fd, _RECORD.size + 1, 0)
        except OSError as error:
            logger.debug("the used bytes cannot be read: %s", error)
            return None
        totals = Totals(*_RECORD.unpack(record)) if len(record) == _RECORD.size else _NOTHING
        # Zeros tell nothing: a process may have been killed between the two steps of its first write.
        plausible = totals != _NOTHING and totals.removed <= totals.added <= _MOST_PLAUSIBLE
        self._stored = totals if plausible else None
        return self._stored

    def _write(self, totals: Totals) -> None:
        self._known = totals
        if self._fd < 0 or self.doubtful or totals == self._stored:
            return
        try:
            if self._stored is None:  # the size changes at once: it is never that of a foreign file
                os.ftruncate(self._fd, _RECORD.size)
            os.pwrite(self._fd, _RECORD.pack(*totals), 0)
        except OSError as error:
            if not self._warned:
                logger.warning("the used bytes cannot be written down: %s", error)
            self._warned = True
        else:
            self._warned = False


def _moved(totals: Totals, change: Totals) -> Totals:
    """The sum never falls below zero, whatever was done to files behind the ledger's back."""
    added = totals.added + change.added
    return Totals(added, min(totals.removed + change.removed, added))


def _opened(path: str) -> int:
    """Open a ledger: a file that is empty, or has the size of one."""
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotALedger(error.errno, f"{path} is no regular file") from error
        raise
    nbytes = os.fstat(fd).st_size
    if nbytes not in (0, _RECORD.size):
        os.close(fd)
        raise NotALedger(0, f"{path} has {nbytes} bytes, where a ledger has {_RECORD.size}")
    return fd


def _is_lost(fd: int) -> bool:
    try:
        return os.fstat(fd).st_nlink == 0
    except OSError:  # ESTALE: another client of a network file system has removed it
        return True
