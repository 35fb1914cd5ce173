"""Locks with flock(2): one that a writer holds as long as it lives, and one for a change to a file.

Each writer of a directory tree has a random token, and keeps a file with the token in its path locked as
long as it lives. The kernel releases the lock when the process dies. So another process that gets the
lock has found a dead writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from contextlib import suppress

WRITER_TOKEN = re.compile(r"[0-9a-f]{16}")
"""Matches a writer's token in a path."""
TOKEN_NBYTES = 8

_HELD = frozenset({errno.EWOULDBLOCK, errno.EACCES})
_RETRY_S = 100e-6


def new_token() -> str:
    """Return a random token for a writer, in hexadecimal digits."""
    return secrets.token_hex(TOKEN_NBYTES)


def try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file. Return False if another process holds the lock.

    Raises:
        OSError: The file system has no locks, or cannot be reached.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:
            raise
        return False
    return True


def try_lock_at(path: str, fd: int) -> bool:
    """Lock the open file that `path` names. Return False if that is not possible any more.

    Another process may hold the lock, or may have removed the file before this call locked it.

    Raises:
        OSError: As `try_lock` does.
    """
    return try_lock(fd) and os.path.exists(path)


def lock_file(fd: int, limit_s: float) -> bool:
    """Lock an open file. Return False if another process still holds the lock after `limit_s`.

    If the file system has no locks, return True, because no other process can hold one there.
    """
    end_s = time.monotonic() + limit_s
    while True:
        try:
            if try_lock(fd):
                return True
        except OSError:
            return True
        if time.monotonic() >= end_s:
            return False
        time.sleep(_RETRY_S)


def unlock_file(fd: int) -> None:
    """Release a lock, even if a forked child holds a copy of the descriptor."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
