"""A file of lines that several processes append to, with a size limit.

Each append is one write at the end of the file, while the file is locked. If the file would exceed
the limit, `log.jsonl` is renamed to `log.jsonl.1`, which replaces the file that was renamed before.
If another program moves the file away, a new one is made.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
_ATTEMPTS = 100


def older_file(path: Path) -> Path:
    """Return the name of the older file that rotation keeps."""
    return path.with_name(f"{path.name}.1")


class LogFile:
    """One process's access to a file of lines. Not thread-safe."""

    def __init__(self, path: Path, max_nbytes: int, *, alone: bool) -> None:
        """Do nothing yet. With `alone`, this process locks the file while it is open."""
        self.path: Path = path
        self._max_nbytes = max_nbytes
        self._alone = alone
        self._descriptor: int | None = None

    def open(self) -> None:
        """Open the file, or make it.

        Raises:
            OSError: The file cannot be written, or is not a regular file.
        """
        if self._descriptor is not None:
            return
        descriptor = os.open(self.path, _FLAGS, _MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{self.path} is not a regular file")
        self._descriptor = descriptor

    def append(self, data: bytes) -> None:
        """Append whole lines, or nothing.

        Raises:
            OSError: The file cannot be written or, with `alone`, another process has locked it.
        """
        descriptor = self._lock()
        try:
            nbytes = os.fstat(descriptor).st_size
            if nbytes and nbytes + len(data) > self._max_nbytes:
                self.path.replace(older_file(self.path))
                self.close()
                descriptor = self._lock()
                nbytes = os.fstat(descriptor).st_size
            _write(descriptor, data, nbytes)
        finally:
            if not self._alone and self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which also unlocks it. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _lock(self) -> int:
        """Open and lock the file that is at the path now. Return its descriptor."""
        for _ in range(_ATTEMPTS):
            self.open()
            assert self._descriptor is not None
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if self._alone else 0))
            if self._has_path(self._descriptor):
                return self._descriptor
            self.close()
        raise OSError(f"{self.path} is replaced again and again")

    def _has_path(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False


def _write(descriptor: int, data: bytes, nbytes: int) -> None:
    """Append `data` to a file of `nbytes`. If it does not fit, remove the part that was written."""
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, nbytes)
        raise
