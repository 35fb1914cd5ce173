"""System calls for directories and files that other programs can reach, too."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from contextlib import suppress

# From linux/magic.h. On these file systems every process sees the same renames and writes.
_LOCAL = frozenset(
    {
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # xfs
        0x9123683E,  # btrfs
        0xF2F52010,  # f2fs
        0x2FC12FC1,  # zfs
        0x01021994,  # tmpfs
        0x858458F6,  # ramfs
        0x794C7630,  # overlayfs
    }
)
_STATFS_NBYTES = 512


def is_local(path: str) -> bool:
    """Return True if `path` is known to be on this machine only. Return False if that is unknown."""
    if not sys.platform.startswith("linux"):
        return False
    status = ctypes.create_string_buffer(_STATFS_NBYTES)
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    if statfs(ctypes.c_char_p(os.fsencode(path)), status):
        return False
    kind = ctypes.c_long.from_buffer(status).value  # f_type is the first field, a long
    return kind & 0xFFFFFFFF in _LOCAL


def identity_of(file: str | int) -> tuple[int, int]:
    """Return the device and the inode of a path or an open file. Do not follow a link.

    Raises:
        OSError: The errors of lstat(2).
    """
    status = os.stat(file) if isinstance(file, int) else os.lstat(file)
    return status.st_dev, status.st_ino


def sync_directory(path: str) -> None:
    """Write the entries of a directory to the disk. Do nothing if the directory is missing."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def refuse_link(directory: str) -> None:
    """Raise if `directory` is a symbolic link, because the target belongs to another program.

    Raises:
        OSError: ELOOP for a link, or an error of lstat(2).
    """
    if stat.S_ISLNK(os.lstat(directory).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), directory)


def open_own(path: str, flags: int) -> int:
    """Open a regular file, and return its descriptor.

    A link, a directory or a pipe in place of the file belongs to another program, and is refused.

    Raises:
        OSError: ELOOP for a symbolic link, EINVAL for another kind of file, or an error of open(2).
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def read_own(path: str, most_nbytes: int) -> bytes:
    """Return the first `most_nbytes` bytes of a small regular file.

    Raises:
        OSError: As `open_own` does.
    """
    fd = open_own(path, os.O_RDONLY)
    try:
        # os.read allocates the size it is given, so ask for no more than the file has.
        return os.read(fd, min(os.fstat(fd).st_size, most_nbytes))
    finally:
        os.close(fd)
