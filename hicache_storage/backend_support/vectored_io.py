"""Read and write whole lists of buffers, and check when O_DIRECT works."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from hicache_storage.backend_support.filesystem import open_own
from hicache_storage.native.reference.pieces import IOV_MAX, move_all, pieces_after

if TYPE_CHECKING:
    from hicache_storage.page import Page

__all__ = [
    "DIRECT",
    "DIRECT_ALIGNMENT",
    "IOV_MAX",
    "is_aligned",
    "move_all",
    "pieces_after",
    "takes_direct_reads",
]

DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag that bypasses the page cache. 0 if the system has none."""
DIRECT_ALIGNMENT = 4096
"""Every file system with O_DIRECT accepts multiples of this as addresses, sizes and offsets."""


def is_aligned(page: Page) -> bool:
    """Return True if O_DIRECT accepts every segment of `page`."""
    return bool(DIRECT) and all(
        address % DIRECT_ALIGNMENT == 0 and nbytes % DIRECT_ALIGNMENT == 0
        for address, nbytes in page.addresses
    )


def takes_direct_reads(path: str) -> bool:
    """Return True if the file at `path` can be read with O_DIRECT, so that its pages can be written so.

    This changes nothing, so it gives the same answer on a full disk and on a read-only mount.
    """
    if not DIRECT:
        return False
    try:
        fd = open_own(path, os.O_RDONLY | DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as block:
            return os.preadv(fd, [block], 0) >= 0
    except OSError:
        return False
    finally:
        os.close(fd)
