"""Place and empty files so that no candidate slows down the next one on ext4.

For a minute after an inode was freed, ext4 does not reuse it, and whoever creates a file searches
past all such inodes of its block group. So after many deletions, creating files is several times
slower. Therefore each candidate gets its own block groups, and files are emptied instead of deleted
until the end.
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
    """Return where many small files should go: tmpfs, or None (the temporary directory)."""
    return _TMPFS if _TMPFS.is_dir() else None


def spread_directories(root: Path) -> None:
    """Make ext4 place each new directory in `root` in a distant block group."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # other file systems refuse the call
            (flags,) = _FLAGS.unpack(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_FLAGS.size)))
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIRECTORY))
    finally:
        os.close(descriptor)


def empty_files(directory: Path) -> None:
    """Truncate every file below `directory`, but keep the files."""
    for path in files_below(directory):
        os.truncate(path, 0)


def drop_cache(directory: Path) -> None:
    """Sync every file below `directory`, and remove it from the kernel's page cache."""
    for path in files_below(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def used_nbytes(directory: Path) -> int:
    """Return the total size of the files below `directory`."""
    return sum(path.stat().st_size for path in files_below(directory))


def files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)
