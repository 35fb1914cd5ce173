"""Counts, measures, ages and removes files under a directory."""

from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

_REMOVAL_LIMIT_S = 5.0
_REMOVAL_POLL_S = 0.01
_TEMPORARY = re.compile(r"(^|[._-])(te?mp|part|partial)([._-]|$)|^\.?tmp|~$|\.swp$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """How many files are under a directory, and how large they are."""

    files: int
    nbytes: int
    longest_nbytes: int
    """The size of the longest file."""

    @classmethod
    def of(cls, root: Path) -> DirectoryUsage:
        sizes = [_size(path) for path in regular_files(root)]
        return cls(len(sizes), sum(sizes), max(sizes, default=0))

    def __str__(self) -> str:
        return f"{self.files} files with {self.nbytes} bytes"


def backdate(root: Path, age_s: float) -> None:
    """Set the times of every file under `root` back by `age_s`."""
    for path in regular_files(root):
        try:
            status = path.stat()
            os.utime(path, (status.st_atime - age_s, status.st_mtime - age_s))
        except OSError:
            continue  # The file has gone since it was listed.


def regular_files(root: Path) -> list[Path]:
    return sorted(
        Path(directory, name)
        for directory, _, names in os.walk(root)
        for name in names
        if Path(directory, name).is_file() and not Path(directory, name).is_symlink()
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def files_under(directory: Path) -> dict[Path, int]:
    """Return every file under a directory with its size. Leave out files that vanish meanwhile."""
    found: dict[Path, int] = {}
    for root, _, names in os.walk(directory):
        for name in names:
            path = Path(root, name)
            try:
                found[path] = path.lstat().st_size
            except FileNotFoundError:
                continue
    return found


def file_states(directory: Path) -> dict[Path, tuple[int, ...]]:
    """Return everything under a directory, with its inode and, for a file, its size and time."""
    found: dict[Path, tuple[int, ...]] = {}
    for root, directories, names in os.walk(directory):
        for name in (*names, *directories):
            path = Path(root, name)
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            is_file = name not in directories
            found[path] = (status.st_ino, *(is_file * (status.st_size, status.st_mtime_ns)))
    return found


def looks_temporary(path: Path) -> bool:
    """Return whether the name of a file marks it as temporary."""
    return _TEMPORARY.search(path.name) is not None


def remove_tree(path: Path | str) -> None:
    """Remove a directory and its contents. Repeat while a killed process may still write into it."""
    deadline_s = time.monotonic() + _REMOVAL_LIMIT_S
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not Path(path).exists() or time.monotonic() > deadline_s:
            return
        time.sleep(_REMOVAL_POLL_S)
