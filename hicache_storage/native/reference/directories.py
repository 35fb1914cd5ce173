"""List directories and look at the files in them, in Python."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from typing import TYPE_CHECKING

from hicache_storage.native.reference.pieces import HIT, LATE, MISS

if TYPE_CHECKING:
    from collections.abc import Sequence

_PAGE_NAME = re.compile(r"[0-9a-f]{32,128}")
_NO_DIRECTORY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def list_directories(paths: Sequence[bytes]) -> tuple[list[int], list[list[str]]]:
    """List directories: the regular files in them whose names are page hashes.

    Args:
        paths: The directories. A symbolic link does not count as a directory.

    Returns:
        The verdict for each directory, and the matching names in it: 32 to 128 lowercase hex digits. A
        verdict is HIT, MISS if there is no directory, or a negated errno.
    """
    _require_paths(paths)
    found = [_list(path) for path in paths]
    return [verdict for verdict, _ in found], [names for _, names in found]


def modes_of(paths: Sequence[bytes]) -> list[int]:
    """Return the st_mode of each path, not following links. 0 if it is missing, or a negated errno."""
    _require_paths(paths)
    return [_mode(path) for path in paths]


def stat_files(paths: Sequence[bytes], deadline_s: float) -> tuple[list[int], list[int], list[int]]:
    """Look up the time and the size of files.

    Args:
        paths: The files.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.

    Returns:
        The verdict for each file, its modification time in nanoseconds, and its size. A verdict is HIT,
        MISS if there is no regular file, LATE, or a negated errno. Without a hit, time and size are 0.
    """
    _require_paths(paths)
    found = [_stat_by(deadline_s, path) for path in paths]
    return (
        [verdict for verdict, _, _ in found],
        [modified_ns for _, modified_ns, _ in found],
        [nbytes for _, _, nbytes in found],
    )


def _list(path: bytes) -> tuple[int, list[str]]:
    names: list[str] = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    is_page = _PAGE_NAME.fullmatch(entry.name) is not None
                    if is_page and entry.is_file(follow_symlinks=False):
                        names.append(entry.name)
        finally:
            os.close(fd)
    except OSError as error:
        return (MISS if error.errno in _NO_DIRECTORY else -(error.errno or 0)), names
    return HIT, names


def _mode(path: bytes) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        return -(error.errno or 0)


def _stat_by(deadline_s: float, path: bytes) -> tuple[int, int, int]:
    return (LATE, 0, 0) if time.monotonic() > deadline_s else _stat(path)


def _stat(path: bytes) -> tuple[int, int, int]:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return MISS, 0, 0
    except OSError as error:
        return -(error.errno or 0), 0, 0
    if not stat.S_ISREG(status.st_mode):
        return MISS, 0, 0
    return HIT, status.st_mtime_ns, status.st_size


def _require_paths(paths: Sequence[bytes]) -> None:
    if any(not path or b"\0" in path for path in paths):
        raise ValueError("a name is not a path")
