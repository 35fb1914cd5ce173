"""The tokens and locks of writers, which show whether a writer is alive or dead.

writers/TOKEN is locked as long as the writer lives. The kernel releases the lock of a dead writer.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress

from hicache_backends.hf3fs.fork_guard import FORKS, WAIT_S
from hicache_backends.hf3fs.layout import new_stamp
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.writer_lock import WRITER_TOKEN, new_token, try_lock_at

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MISSING_NS = 600 * 10**9


class Writer:
    """One writer's token and lock. Thread-safe; belongs to the process that made it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._serials = itertools.count()
        self._fd = -1
        while self._fd < 0:  # a collector may remove the file before it is locked
            self.token = new_token()
            self._fd = _lock_file(f"{directory}/{self.token}", os.O_CREAT | os.O_EXCL)

    def stamp(self) -> bytes:
        """Return the stamp of a new write."""
        return new_stamp(self.token, next(self._serials))

    def close(self) -> None:
        """Unlock and remove the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.unlink(f"{self._directory}/{self.token}")
            FORKS.release(fd)


def is_dead(directory: str, token: str, reserved_ns: int) -> bool:
    """Return True if the writer with this token is gone, and remove its file.

    If a writer's file is missing, the writer may have lost it. It counts as dead ten minutes after
    `reserved_ns`, the time of its last known reservation.
    """
    path = f"{directory}/{token}"
    try:
        fd = _lock_file(path, 0)
    except FileNotFoundError:
        return time.time_ns() - reserved_ns > _MISSING_NS
    except OSError:
        return False
    if fd < 0:
        return False
    with suppress(OSError):
        if not os.fstat(fd).st_size:  # our files are empty
            os.unlink(path)
    FORKS.release(fd)
    return True


def tokens(directory: str) -> set[str]:
    """Return the tokens of all writers that have a file."""
    try:
        return {name for name in os.listdir(directory) if WRITER_TOKEN.fullmatch(name)}
    except FileNotFoundError:
        return set()


def _lock_file(path: str, flags: int) -> int:
    """Return a descriptor that holds the lock, or -1 if another process holds it or the file is gone.

    A forked child closes its copy, so that the lock ends with this process.
    """
    with FORKS.step(Deadline(2 * WAIT_S)):
        fd = os.open(path, _FLAGS | flags, 0o666)
        FORKS.hold(fd)
    try:
        if try_lock_at(path, fd):
            return fd
    except OSError:
        FORKS.release(fd)
        raise
    FORKS.release(fd)
    return -1
