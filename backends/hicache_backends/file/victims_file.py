"""The oldest pages under a root, written down by the one process that surveyed, for all that evict.

survey/victims   a header, then one line a page, oldest first: "MODIFIED_NS NBYTES ID/HH/HASH\\n"
survey/lock      held locked by the process that surveys; renewed while the survey goes on

Header: magic, the offset of the first page that nobody has taken, when the survey began, how long it
took. Each process takes a few pages and moves the offset, so that no two try to evict the same ones.
What is taken by a process that dies is listed again by the next survey. A claim looks at its page once
more: a list that is old, or was taken from twice, evicts nothing that is in use.
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

from hicache_backends.file.descriptors import lock_file, open_own, read_own, unlock_file
from hicache_backends.file.layout import refuse_link

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_backends.file.layout import Layout

logger = logging.getLogger(__name__)

PageFile: TypeAlias = tuple[int, int, str]
"""What a Victim has, without its cost: the modification time, the size and the path of a page file."""

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"HiVictim"
_TAKEN_OFFSET = 8
_LINE = re.compile(
    rb"(-?[0-9]{1,19}) ([0-9]{1,15}) ([0-9a-f]{32}/([0-9a-f]{2})/\4(?:[0-9a-f]{2}){15,63})\n"
)
_MOST_LINE_NBYTES = 256
_LINES_A_WRITE = 1024
# Enough to make the file's costs small, and so few of a short list that something is left for others.
_MOST_TAKEN = 32
_TAKEN_SHARE = 16
# The lock is held for microseconds; whoever was stopped while it held it is not waited for.
_PATIENCE_S = 0.01
_BEAT_S = 5.0
_STALLED_S = 60.0


class Victim(NamedTuple):
    """A page file as a survey saw it. Victims sort by age."""

    modified_ns: int
    nbytes: int
    path: str


class Survey(NamedTuple):
    """What a list tells of itself, and of the survey that made it."""

    taken: int
    """The offset of the first page that nobody has taken."""
    end: int
    """The offset behind the last page."""
    begun_ns: int
    """By the clock on the wall; it also tells one survey from another."""
    took_ns: int

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to list."""
        return self.end <= _HEADER.size

    @property
    def left(self) -> float:
        """The share of the list that nobody has taken, from 0.0 to 1.0."""
        return max(0, self.end - self.taken) / max(1, self.end - _HEADER.size)


class Share(NamedTuple):
    """The pages that a process took from the list."""

    victims: list[Victim]
    survey: Survey | None
    """The list as it is now; None where there is none."""


class VictimsFile:
    """The list of one root. Thread-safe; it has no state in memory."""

    def __init__(self, layout: Layout) -> None:
        self._spaces = layout.spaces
        self._directory = layout.survey
        self._path = f"{layout.survey}/victims"

    def survey(self) -> Survey | None:
        """Return what is known of the survey that made the list; None where there is no list."""
        try:
            fd = open_own(self._path, os.O_RDONLY)
        except OSError:
            return None
        try:
            return _survey_of(fd)
        except OSError:
            return None
        finally:
            os.close(fd)

    def take(self) -> Share:
        """Take the oldest pages that nobody has taken."""
        try:
            fd = open_own(self._path, os.O_RDWR)
        except OSError:
            return Share([], None)
        try:
            locked = lock_file(fd, _PATIENCE_S)
            try:
                return self._taken(fd)
            finally:
                if locked:
                    unlock_file(fd)
        except OSError as error:
            logger.debug("the list of old pages cannot be read: %s", error)
            return Share([], None)
        finally:
            os.close(fd)

    def publish(
        self, oldest_first: Iterable[PageFile], begun_ns: int, took_ns: int, temp_path: str
    ) -> bool:
        """Replace the list; False, and nothing is changed, where that cannot be done."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self._directory)
            self._check_own()
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

    def _taken(self, fd: int) -> Share:
        survey = _survey_of(fd)
        if survey is None:
            return Share([], None)
        left_nbytes = max(0, survey.end - survey.taken)
        count = min(_MOST_TAKEN, left_nbytes // (_MOST_LINE_NBYTES * _TAKEN_SHARE) + 1)
        victims, nbytes = self._parsed(os.pread(fd, count * _MOST_LINE_NBYTES, survey.taken), count)
        taken = survey.taken + nbytes if victims else survey.end  # what is damaged ends the list
        if taken != survey.taken:
            os.pwrite(fd, taken.to_bytes(8, "little"), _TAKEN_OFFSET)
        return Share(victims, survey._replace(taken=taken))

    def _parsed(self, data: bytes, count: int) -> tuple[list[Victim], int]:
        victims: list[Victim] = []
        offset = 0
        while len(victims) < count and (line := _LINE.match(data, offset)) is not None:
            path = f"{self._spaces}/{line[3].decode('ascii')}"
            victims.append(Victim(int(line[1]), int(line[2]), path))
            offset = line.end()
        return victims, offset

    def _lines(self, victims: Iterable[PageFile]) -> Iterator[bytes]:
        prefix = len(self._spaces) + 1
        todo = iter(victims)
        while some := list(islice(todo, _LINES_A_WRITE)):
            lines = [f"{time_ns} {nbytes} {path[prefix:]}\n" for time_ns, nbytes, path in some]
            yield "".join(lines).encode("ascii")

    def _check_own(self) -> None:
        """Refuse to replace another program's file. After a loss of power ours can be empty."""
        refuse_link(self._directory)
        with suppress(FileNotFoundError):
            found = read_own(self._path, _HEADER.size)
            if found and not found.startswith(_MAGIC):
                raise OSError(errno.EEXIST, "another program's file is in the way", self._path)


class SurveyLock:
    """The right to survey a root for all its processes. Used by one thread.

    A holder that was killed gives it up. One that was stopped, or whose file system hangs, shows no sign
    of life any more, and others survey without the lock.
    """

    def __init__(self, layout: Layout) -> None:
        self._directory = layout.survey
        self._path = f"{layout.survey}/lock"
        self._fd = -1
        self._beat_s = 0.0

    def acquire(self) -> bool:
        """Whether this process is to survey. True also where the file system has no locks."""
        try:
            with suppress(FileExistsError):
                os.mkdir(self._directory)
            refuse_link(self._directory)
            fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            logger.debug("the survey cannot be shared: %s", error)
            return True
        if not lock_file(fd, 0.0):
            # A beat to come is one from before the clock was set back.
            stalled = abs(time.time() - os.fstat(fd).st_mtime) > _STALLED_S
            os.close(fd)
            return stalled
        self._fd = fd
        self._beat_s = 0.0
        self.beat()
        return True

    def beat(self) -> None:
        """Show that the survey goes on."""
        if self._fd >= 0 and time.monotonic() >= self._beat_s:
            self._beat_s = time.monotonic() + _BEAT_S
            with suppress(OSError):
                os.utime(self._fd)

    def release(self) -> None:
        """Let others survey. Idempotent."""
        if self._fd >= 0:
            unlock_file(self._fd)
        self.forget()

    def forget(self) -> None:
        """Close in a forked child."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _survey_of(fd: int) -> Survey | None:
    header = os.pread(fd, _HEADER.size, 0)
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        return None
    _, taken, begun_ns, took_ns = _HEADER.unpack(header)
    return Survey(max(taken, _HEADER.size), os.fstat(fd).st_size, begun_ns, took_ns)
