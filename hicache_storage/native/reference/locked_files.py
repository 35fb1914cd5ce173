"""Small files that processes change under a lock, in Python."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time

from hicache_storage.native.reference.pieces import HIT, LATE, MISS, WRONG

_TOTALS = struct.Struct("<QQ")
_MOST_TOTAL = 1 << 62
_LOCK_RETRY_S = 50e-6
_LIST_HEADER = struct.Struct("<8sQ16s")
_LIST = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TAKEN_OFFSET = 8
_LINE_MOST_NBYTES = 256
_MOST_LINES = 1 << 16


def change_totals(fd: int, added: int, removed: int, wait_s: float) -> tuple[int, int, int]:
    """Add to the two counters of a ledger under its lock.

    Args:
        fd: The ledger: the bytes ever added and the bytes ever removed, in little-endian words.
        added: The bytes to add.
        removed: The bytes to remove. No more are removed than were ever added.
        wait_s: The limit of the wait for the lock.

    Returns:
        HIT and both counters. The verdict is MISS where the file has lost its name, WRONG where it has
        no counters, LATE where another process has the lock, or a negated errno. The counters mean
        nothing then.
    """
    try:
        return _change_totals(fd, added, removed, wait_s)
    except OSError as error:
        return -(error.errno or 0), 0, 0


def take_lines(
    path: str | bytes, magic: bytes, share_nbytes: int, least: int, most: int, wait_s: float
) -> tuple[int, bytes, int, bytes]:
    """Take whole lines from a list that several processes take from.

    Args:
        path: The list: 8 bytes of magic, the offset of the first line that nobody has taken as a
            little-endian word, 16 bytes of any meaning, and the lines, of at most 256 bytes each.
        magic: The 8 bytes with which the list begins.
        share_nbytes: One line is taken for so many bytes that are left, and one more.
        least: The number of lines that are taken in any case, where there are so many.
        most: The number of lines that are never exceeded; up to 65536.
        wait_s: The limit of the wait for the lock. Without the lock the lines are taken, too.

    Returns:
        The verdict, the header as it is now, the size of the list, and the lines. The verdict is HIT,
        with no line where none is left or the next one is too long; WRONG where the file is no list;
        or a negated errno. The rest means nothing where it is not HIT.
    """
    if len(magic) != _TAKEN_OFFSET or share_nbytes < 1 or not 0 < most <= _MOST_LINES:
        raise ValueError("magic, share and bounds do not fit together")
    try:
        fd = os.open(path, _LIST)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return -errno.EINVAL, b"", 0, b""
            try:
                is_locked = _lock(fd, wait_s)
            except OSError:  # the file system has no locks
                is_locked = False
            try:
                return _take_lines(fd, magic, share_nbytes, least, most)
            finally:
                if is_locked:
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)
    except OSError as error:
        return -(error.errno or 0), b"", 0, b""


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


def _take_lines(
    fd: int, magic: bytes, share_nbytes: int, least: int, most: int
) -> tuple[int, bytes, int, bytes]:
    header = os.pread(fd, _LIST_HEADER.size, 0)
    if len(header) != _LIST_HEADER.size or not header.startswith(magic):
        return WRONG, b"", 0, b""
    _, taken, rest = _LIST_HEADER.unpack(header)
    taken = max(taken, _LIST_HEADER.size)
    end = os.fstat(fd).st_size
    left_nbytes = max(0, end - taken)
    count = min(most, max(least, left_nbytes // share_nbytes + 1))
    data = os.pread(fd, count * _LINE_MOST_NBYTES, taken) if left_nbytes else b""
    nbytes = 0
    for _ in range(count):
        newline = data.find(b"\n", nbytes, nbytes + _LINE_MOST_NBYTES)
        if newline < 0:
            break
        nbytes = newline + 1
    if nbytes:
        os.pwrite(fd, (taken + nbytes).to_bytes(8, "little"), _TAKEN_OFFSET)
    return HIT, _LIST_HEADER.pack(magic, taken + nbytes, rest), end, data[:nbytes]


def _lock(fd: int, wait_s: float) -> bool:
    """Lock a file, and return False where another process has the lock for `wait_s`.

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
