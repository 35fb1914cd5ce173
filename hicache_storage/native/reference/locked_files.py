"""Change small files under a lock that processes share, in Python."""

from __future__ import annotations

import fcntl
import os
import struct
import time

from hicache_storage.native.reference.pieces import HIT, LATE, MISS, WRONG

_TOTALS = struct.Struct("<QQ")
_MOST_TOTAL = 1 << 62
_LOCK_RETRY_S = 50e-6


def change_totals(fd: int, added: int, removed: int, wait_s: float) -> tuple[int, int, int]:
    """Add to the two counters of a ledger, under the ledger's lock.

    Args:
        fd: The ledger: the bytes ever added, and the bytes ever removed, as little-endian words.
        added: The bytes to add.
        removed: The bytes to remove. The total never exceeds the bytes ever added.
        wait_s: How long to wait for the lock.

    Returns:
        HIT and both counters. If the verdict is not HIT, the counters mean nothing: MISS if the file has
        lost its name, WRONG if it has no counters, LATE if another process holds the lock, or a negated
        errno.
    """
    try:
        return _change_totals(fd, added, removed, wait_s)
    except OSError as error:
        return -(error.errno or 0), 0, 0


def _change_totals(fd: int, added: int, removed: int, wait_s: float) -> tuple[int, int, int]:
    try:
        if not os.fstat(fd).st_nlink:
            return MISS, 0, 0
    except OSError:
        return MISS, 0, 0
    if not _lock(fd, wait_s):
        return LATE, 0, 0
    try:
        record = os.pread(fd, _TOTALS.size + 1, 0)
        before = _TOTALS.unpack(record) if len(record) == _TOTALS.size else (0, 0)
        if not (0 < before[0] <= _MOST_TOTAL and before[1] <= before[0]):
            return WRONG, 0, 0
        total = before[0] + added
        after = total, min(before[1] + removed, total)
        if added or removed:
            os.pwrite(fd, _TOTALS.pack(*after), 0)
        return HIT, *after
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock(fd: int, wait_s: float) -> bool:
    """Lock a file. Return False if another process holds the lock for `wait_s`.

    Raises:
        OSError: The file system has no locks.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOCK_RETRY_S)
        else:
            return True
