"""Reading and writing lists of buffers, whole, whatever the kernel does in one call."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Buffers: TypeAlias = Sequence[memoryview | bytes | bytearray]

_IOV_MAX = 1024


def read_into(fd: int, buffers: Sequence[memoryview | bytearray], nbytes: int) -> int:
    """Fill `buffers`, `nbytes` in all, from the start of the file; fewer where the file ends."""
    done = os.preadv(fd, buffers[:_IOV_MAX], 0)
    if done == nbytes:
        return done
    return _rest(os.preadv, fd, buffers, done)


def write_from(fd: int, buffers: Buffers, nbytes: int) -> None:
    """Write all of `buffers`, `nbytes` in all, at the start of the file."""
    done = os.pwritev(fd, buffers[:_IOV_MAX], 0)
    if done != nbytes:
        _rest(os.pwritev, fd, buffers, done)


def _rest(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Buffers,
    done: int,
) -> int:
    """Go on after a call that stopped at `done`: more than IOV_MAX buffers, or 2 GiB, or a signal."""
    todo = _after([memoryview(buffer) for buffer in buffers], done)
    while todo:
        step = call(fd, todo[:_IOV_MAX], done)
        if not step:
            break
        done += step
        todo = _after(todo, step)
    return done


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """`views` without their first `nbytes`."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []
