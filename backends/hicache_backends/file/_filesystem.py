"""Entries of directories on their way to the disk."""

from __future__ import annotations

import os
from contextlib import suppress


def sync_directory(path: str) -> None:
    """Write a directory's entries to the disk. A directory that is gone has none."""
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
