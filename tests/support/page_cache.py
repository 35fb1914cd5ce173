"""Files in the kernel's page cache: drop them from it, and see what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def drop(path: Path | bytes, *, sync: bool = True) -> None:
    """Remove a file from the page cache. Without `sync`, bytes that were just written stay there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if sync:
            os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def has(path: Path, offset: int = 0) -> bool:
    """Return True if the byte at `offset` is there. If not, the kernel may begin to read it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return bool(os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def require(folder: Path) -> None:
    """Skip the test if the file system of `folder` does not tell what is in the page cache."""
    path = folder / "looked-at"
    path.write_bytes(b"page")
    try:
        has(path)
    except OSError as error:
        pytest.skip(f"{folder} does not tell what is in the page cache: {error}")
    finally:
        path.unlink()
