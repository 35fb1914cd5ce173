"""System calls that need care: syncs of directories, files that may be strangers', locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress

_RETRY_S = 100e-6


def sync_directory(path: str) -> None:
    """Write a directory's entries to the disk. A directory that is gone has none."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def open_own(path: str, flags: int) -> int:
    """Open a regular file; a link to one, a directory or a pipe in its place is none of ours.

    Raises:
        OSError: ELOOP for a symlink, EINVAL for another kind of file, and what `open` raises.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_own(path: str, most_nbytes: int) -> bytes:
    """Return the first bytes of a small regular file.

    Raises:
        OSError: As `open_own` does.
    """
    fd = open_own(path, os.O_RDONLY)
    try:
        return os.read(fd, most_nbytes)
    finally:
        os.close(fd)


def lock_file(fd: int, patience_s: float) -> bool:
    """Lock a file, and return False where somebody else still holds it after `patience_s`.

    A file system without locks gives True: nobody else can hold one there.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return True
        else:
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_RETRY_S)


def unlock_file(fd: int) -> None:
    """Give a lock back, also where a forked child holds a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
