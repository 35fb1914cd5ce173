"""The list of the oldest pages under a root, written by the one process that scans, for all that evict.

survey/victims   a header, then one line a page, oldest first: "MODIFIED_NS NBYTES ID/HH/HASH\\n"
survey/lock      held locked by the process that scans; its time is renewed while the scan goes on

The header holds the magic, the offset of the first page that no process has taken, the begin of the scan
and its duration. Each process takes a few pages and moves the offset, so that no two try to evict the
same ones. The pages taken by a process that dies are listed again by the next scan. A claim checks its
page once more, so an old list, or one taken from twice, evicts nothing that is in use.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_storage import native
from hicache_storage.backend_support.filesystem import open_own, read_own, refuse_link
from hicache_storage.backend_support.writer_lock import lock_file, unlock_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_backends.file.layout import Layout

logger = logging.getLogger(__name__)

ScannedPage: TypeAlias = tuple[int, int, str]
"""The fields of a Victim without its cost: modification time, size and path of a page file."""

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"HiVictim"
_TAKEN_OFFSET = 8
_LINE = re.compile(
    rb"(-?[0-9]{1,19}) ([0-9]{1,15}) ([0-9a-f]{32}/([0-9a-f]{2})/\4(?:[0-9a-f]{2}){15,63})\n"
)
_LINES_A_WRITE = 1024
# So many that the costs of the file are small, and so few that a short list serves other processes, too.
_MOST_TAKEN = 256
_SHARE_NBYTES = 2048
# The lock is held for microseconds. A process that was stopped while it held the lock is not waited for.
_WAIT_S = 0.01
_RENEWAL_S = 5.0
_STALLED_S = 60.0


class Victim(NamedTuple):
    """A page file as a scan saw it. Victims sort by age."""

    modified_ns: int
    nbytes: int
    path: str


class ScanInfo(NamedTuple):
    """The header of a list, and its size."""

    taken: int
    """The offset of the first page that no process has taken."""
    end: int
    """The offset behind the last page."""
    begun_ns: int
    """The begin of the scan by the wall clock, which also identifies the scan."""
    took_ns: int

    @property
    def is_empty(self) -> bool:
        """True when the scan found no page."""
        return self.end <= _HEADER.size

    @property
    def left(self) -> float:
        """The share of the list that no process has taken, from 0.0 to 1.0."""
        return max(0, self.end - self.taken) / max(1, self.end - _HEADER.size)


class TakenVictims(NamedTuple):
    """The pages that a process took from the list."""

    victims: list[Victim]
    scan: ScanInfo | None
    """The list afterwards; None when there is no list."""


class VictimsFile:
    """The list of one root. Thread-safe; it has no state in memory."""

    def __init__(self, layout: Layout) -> None:
        self._spaces = layout.spaces
        self._directory = layout.scans
        self._path = f"{layout.scans}/victims"

    def info(self) -> ScanInfo | None:
        """Return the header of the list; None when there is no list."""
        try:
            fd = open_own(self._path, os.O_RDONLY)
        except OSError:
            return None
        try:
            return _read_info(fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def take(self, count: int = 1) -> TakenVictims:
        """Take the oldest pages that no process has taken: a share of those left, or `count` if more."""
        verdict, header, end, lines = native.take_lines(
            self._path, _MAGIC, _SHARE_NBYTES, count, _MOST_TAKEN, _WAIT_S
        )
        if verdict != native.HIT:
            return TakenVictims([], None)
        _, taken, begun_ns, took_ns = _HEADER.unpack(header)
        victims, nbytes = self._parse(lines)
        if nbytes < len(lines) or not lines:  # a damaged line ends the list
            taken = self._end(taken, end)
        return TakenVictims(victims, ScanInfo(taken, end, begun_ns, took_ns))

    def publish(
        self, oldest_first: Iterable[ScannedPage], begun_ns: int, took_ns: int, temp_path: str
    ) -> bool:
        """Replace the list; return False, with nothing changed, when that is not possible."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self._directory)
            self._refuse_foreign()
            with open(temp_path, "xb") as file:
                file.write(_HEADER.pack(_MAGIC, _HEADER.size, begun_ns, took_ns))
                file.writelines(self._lines(oldest_first))
            os.rename(temp_path, self._path)
        except OSError as error:
            logger.debug("the list of old pages cannot be shared: %s", error)
            with suppress(OSError):
                os.unlink(temp_path)
            return False
        return True

    def _end(self, taken: int, end: int) -> int:
        """Take all the rest of the list, of which `taken` bytes are taken; return that offset."""
        if taken < end:
            with suppress(OSError):
                fd = open_own(self._path, os.O_WRONLY)
                try:
                    os.pwrite(fd, end.to_bytes(8, "little"), _TAKEN_OFFSET)
                finally:
                    os.close(fd)
        return max(taken, end)

    def _parse(self, data: bytes) -> tuple[list[Victim], int]:
        victims: list[Victim] = []
        offset = 0
        while (line := _LINE.match(data, offset)) is not None:
            path = f"{self._spaces}/{line[3].decode('ascii')}"
            victims.append(Victim(int(line[1]), int(line[2]), path))
            offset = line.end()
        return victims, offset

    def _lines(self, victims: Iterable[ScannedPage]) -> Iterator[bytes]:
        prefix = len(self._spaces) + 1
        todo = iter(victims)
        while some := list(islice(todo, _LINES_A_WRITE)):
            lines = [f"{time_ns} {nbytes} {path[prefix:]}\n" for time_ns, nbytes, path in some]
            yield "".join(lines).encode("ascii")

    def _refuse_foreign(self) -> None:
        """Refuse to replace another program's file. After a loss of power our own can be empty."""
        refuse_link(self._directory)
        with suppress(FileNotFoundError):
            found = read_own(self._path, _HEADER.size)
            if found and not found.startswith(_MAGIC):
                raise OSError(errno.EEXIST, "another program's file is in the way", self._path)


class ScanLock:
    """The right of one process to scan a root for all processes. Used by one thread.

    The kernel releases the lock of a killed holder. A holder that was stopped, or whose file system
    hangs, does not renew the time of the lock; then others scan without the lock.
    """

    def __init__(self, layout: Layout) -> None:
        self._directory = layout.scans
        self._path = f"{layout.scans}/lock"
        self._fd = -1
        self._renewal_s = 0.0

    def acquire(self) -> bool:
        """Return True when this process is to scan. That is so, too, on a file system without locks."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self._directory)
            refuse_link(self._directory)
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            logger.debug("the scan cannot be shared: %s", error)
            return True
        if not lock_file(fd, 0.0):
            # A time in the future was set before the clock was set back.
            stalled = abs(time.time() - os.fstat(fd).st_mtime) > _STALLED_S
            os.close(fd)
            return stalled
        self._fd = fd
        self._renewal_s = 0.0
        self.renew()
        return True

    def renew(self) -> None:
        """Renew the time of the lock, which shows that the scan goes on."""
        if self._fd >= 0 and time.monotonic() >= self._renewal_s:
            self._renewal_s = time.monotonic() + _RENEWAL_S
            with suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Let other processes scan. Idempotent."""
        if self._fd >= 0:
            unlock_file(self._fd)
        self.abandon()

    def abandon(self) -> None:
        """Close in a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _read_info(fd: int) -> ScanInfo | None:
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, taken, begun_ns, took_ns = _HEADER.unpack(header)
    return ScanInfo(max(taken, _HEADER.size), os.fstat(fd).st_size, begun_ns, took_ns)
