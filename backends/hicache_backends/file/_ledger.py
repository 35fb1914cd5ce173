"""How many bytes the pages of a root take, agreed on by all processes that use it.

The file holds two counters, bytes ever added and bytes ever removed. Both only grow, so that a survey of
the directory that takes seconds can tell what happened meanwhile. A writer adds before it writes and
removes after it has unlinked: whoever dies in between leaves the sum too high, never too low.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator

logger = logging.getLogger(__name__)

_RECORD = struct.Struct("<QQ")
# The lock is held for microseconds. It guards a sum, not pages: going on without it costs accuracy only.
_PATIENCE_S = 1.0
_RETRY_S = 100e-6


class Totals(NamedTuple):
    """Bytes since the ledger was begun."""

    added: int
    removed: int

    @property
    def used(self) -> int:
        """Bytes that are there now."""
        return self.added - self.removed


class Ledger:
    """The used bytes of one root. Thread-safe; after `close` everything is a no-op."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._stored: Totals | None = None
        found = self._read()
        self._known = found or Totals(0, 0)
        self.doubtful = found is None
        """The file was new, or no ledger: only a survey can tell what is used."""

    @property
    def used(self) -> int:
        """The sum as this process last saw it. No I/O."""
        return self._known.used

    def totals(self) -> Totals:
        """Both counters, from the file."""
        return self._change(0, 0)

    def add(self, nbytes: int) -> int:
        """Add bytes, or remove them where `nbytes` is negative; the new sum."""
        return self._change(max(nbytes, 0), max(-nbytes, 0)).used

    def settle(self, found: int, pending: int, since: Totals) -> int:
        """Put the sum right after a survey; the new sum.

        `found` bytes of pages were seen; `pending` bytes were promised to writers when it began, at
        `since`. What came and went meanwhile may or may not have been seen: the sum is moved no further
        than the survey proves.
        """
        with self._exclusive():
            now = self._read() or Totals(0, 0)
            least = found - max(0, now.removed - since.removed)
            most = found + pending + max(0, now.added - since.added)
            wanted = min(max(now.used, least), most)
            self._write(self._moved(now, max(wanted - now.used, 0), max(now.used - wanted, 0)))
            self.doubtful = False
            return self._known.used

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def forget(self) -> None:
        """Close in a forked child. Takes no lock: the thread that held it may not exist here."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _change(self, added: int, removed: int) -> Totals:
        with self._exclusive():
            self._write(self._moved(self._read() or Totals(0, 0), added, removed))
            return self._known

    @staticmethod
    def _moved(totals: Totals, added: int, removed: int) -> Totals:
        """The sum never falls below zero, whatever was done to files behind the ledger's back."""
        added += totals.added
        return Totals(added, min(totals.removed + removed, added))

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        """Alone among threads and processes. Without file locks, the sum may be off until a survey."""
        with self._lock:
            if self._fd < 0:
                yield
                return
            _lock_file(self._fd)
            try:
                yield
            finally:
                with suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self) -> Totals | None:
        if self._fd < 0:
            return self._known
        record = os.pread(self._fd, _RECORD.size + 1, 0)
        totals = Totals(*_RECORD.unpack(record)) if len(record) == _RECORD.size else None
        self._stored = totals if totals and totals.removed <= totals.added else None
        return self._stored

    def _write(self, totals: Totals) -> None:
        self._known = totals
        if self._fd < 0 or totals == self._stored:
            return
        try:
            os.pwrite(self._fd, _RECORD.pack(*totals), 0)
            if self._stored is None:
                os.ftruncate(self._fd, _RECORD.size)
        except OSError as error:
            logger.warning("the used bytes cannot be written down: %s", error)


def _lock_file(fd: int) -> None:
    """Wait for the lock, but not for a process that was stopped while it held it."""
    deadline_s = time.monotonic() + _PATIENCE_S
    with suppress(OSError):
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    return
                time.sleep(_RETRY_S)
            else:
                return
