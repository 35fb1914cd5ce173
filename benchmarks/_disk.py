"""Directories and deletions that do not slow down the next candidate on ext4.

ext4 does not reuse an inode for a minute after it was freed, and a file creation searches past each
such inode of its block group. So file creation is several times slower after many deletions. Each
candidate gets block groups of its own, and files are emptied, not deleted, until the end.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# <linux/fs.h>
_GET_FLAGS = 0x80086601
_SET_FLAGS = 0x40086602
_TOP_DIRECTORY = 0x00020000
_FLAGS = struct.Struct("l")

_TMPFS = Path("/dev/shm")  # noqa: S108 - new directories in it


def default_parent() -> Path | None:
    """Return tmpfs where there is one, for many small files. None: the temporary directory."""
    return _TMPFS if _TMPFS.is_dir() else None


def spread_directories(root: Path) -> None:
    """Let ext4 place each directory that is made in `root` in a distant block group."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # other file systems refuse the call
            (flags,) = _FLAGS.unpack(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_FLAGS.size)))
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIRECTORY))
    finally:
        os.close(descriptor)


def empty_files(directory: Path) -> None:
    """Truncate every file below `directory`, and keep the files."""
    for path in files_below(directory):
        os.truncate(path, 0)


def used_nbytes(directory: Path) -> int:
    """Return the total size of the files below `directory`."""
    return sum(path.stat().st_size for path in files_below(directory))


def files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)
