"""Keeping one candidate's files from slowing down another's.

ext4 does not hand out an inode again for a minute after it was freed, and steps over each such inode of
a block group for every file that is created there: files are created several times slower where many
have been deleted. So candidates get block groups of their own, and files are emptied, not deleted, until
everything was measured.
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


def spread_directories(root: Path) -> None:
    """Let directories made in `root` go to block groups far from each other, where ext4 does that."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # another file system
            (flags,) = _FLAGS.unpack(fcntl.ioctl(descriptor, _GET_FLAGS, bytes(_FLAGS.size)))
            fcntl.ioctl(descriptor, _SET_FLAGS, _FLAGS.pack(flags | _TOP_DIRECTORY))
    finally:
        os.close(descriptor)


def empty_files(directory: Path) -> None:
    """Free the room of every file below `directory`, and keep the files."""
    for path in files_below(directory):
        os.truncate(path, 0)


def used_nbytes(directory: Path) -> int:
    """The sizes of all files below `directory`."""
    return sum(path.stat().st_size for path in files_below(directory))


def files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)
