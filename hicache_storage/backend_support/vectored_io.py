"""Complete reads and writes of buffer lists, and the conditions under which O_DIRECT works."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.page import Page

    Buffers: TypeAlias = Sequence[memoryview | bytes | bytearray]
    Call: TypeAlias = Callable[[int, Any, int], int]

IOV_MAX = 1024
"""The number of buffers that the kernel takes in one call."""
DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag that goes around the page cache; 0 where the system has none."""
DIRECT_ALIGNMENT = 4096
"""The multiple of addresses, sizes and offsets that every file system with O_DIRECT takes."""


def move_all(call: Call, fd: int, buffers: Buffers, nbytes: int, offset: int = 0) -> int:
    """Move all of `buffers`, `nbytes` together, and return how many bytes were moved.

    Args:
        call: os.preadv, os.pwritev, or a function with their arguments. One call may stop early:
        the
            kernel takes 1024 buffers and 2 GiB at a time, and a signal interrupts it.
        fd: The open file.
        buffers: Memory to fill or to write.
        nbytes: The sum of the sizes of `buffers`.
        offset: The place in the file.

    Returns:
        `nbytes`, or fewer when the file ends before.
    """
    done = call(fd, buffers[:IOV_MAX], offset)
    if done in (0, nbytes):
        return done
    todo = _without(done, [memoryview(buffer) for buffer in buffers])
    while todo:
        step = call(fd, todo[:IOV_MAX], offset + done)
        if not step:
            break
        done += step
        todo = _without(step, todo)
    return done


def is_aligned(page: Page) -> bool:
    """Return True when O_DIRECT takes every segment of `page`."""
    return bool(DIRECT) and all(
        address % DIRECT_ALIGNMENT == 0 and nbytes % DIRECT_ALIGNMENT == 0
        for address, nbytes in page.addresses
    )


def takes_direct_writes(fd: int) -> bool:
    """Return True when one block can be written to a new file that was opened with O_DIRECT."""
    if not DIRECT:
        return False
    try:
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as block:
            return os.pwrite(fd, block, 0) == DIRECT_ALIGNMENT
    except OSError:
        return False


def _without(nbytes: int, views: list[memoryview]) -> list[memoryview]:
    """Return `views` without their first `nbytes`."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
