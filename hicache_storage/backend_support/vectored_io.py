"""Read and write whole lists of buffers, and check when O_DIRECT works."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

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
    "takes_direct_writes",
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


def takes_direct_writes(fd: int) -> bool:
    """Return True if one block can be written to a new file that was opened with O_DIRECT."""
    if not DIRECT:
        return False
    try:
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as block:
            return os.pwrite(fd, block, 0) == DIRECT_ALIGNMENT
    except OSError:
        return False
