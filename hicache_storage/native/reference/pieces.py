"""Move, measure and hash pages that consist of several pieces of memory. Also defines the verdicts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Buffer

    Pieces: TypeAlias = Sequence[Buffer]

MISS, HIT, WRONG, LATE, UNSYNCED, KEPT, NO_BULK, REVOKED = range(8)
"""The verdict for one page. A negative number is a negated errno."""

IOV_MAX = 1024
"""How many buffers the kernel accepts in one call."""


def copy_pages(
    targets: Sequence[Pieces],
    sources: Sequence[Pieces],
    skip: int,
    far: bool = False,  # noqa: ARG001, FBT002 - positional in the compiled module
) -> list[int]:
    """Copy the bytes of pages.

    Args:
        targets: The memory of each page.
        sources: The bytes of each page, as many as its target has, in pieces of any size.
        skip: How many leading bytes the digest of a page leaves out. Negative: no digests.
        far: The sources are not in the processor's caches, and nobody reads the targets soon. This only
            changes the speed.

    Returns:
        The xxh3-64 of each page. Empty if no digests were asked for.

    Raises:
        ValueError: A page and its target have different sizes. Nothing was copied.
    """
    fits = list(map(nbytes_of, targets)) == list(map(nbytes_of, sources))
    if not fits:
        raise ValueError("targets and sources do not fit together")
    for target, source in zip(targets, sources, strict=True):
        copy_pieces(target, source)
    return [digest_of(target, skip) for target in targets] if skip >= 0 else []


def move_all(
    call: Callable[[int, Any, int], int], fd: int, pieces: Pieces, nbytes: int, offset: int = 0
) -> int:
    """Move `nbytes` between a file and memory. Return how many bytes were moved.

    Args:
        call: os.preadv, os.pwritev, or a function with the same arguments. One call may stop early,
            because the kernel accepts 1024 buffers and 2 GiB at a time, and a signal interrupts it.
        fd: The open file.
        pieces: Memory to fill, or to write from.
        nbytes: The sum of the sizes of `pieces`.
        offset: The position in the file.

    Returns:
        `nbytes`, or fewer if the file ends earlier.
    """
    done = call(fd, pieces[:IOV_MAX], offset)
    if done in (0, nbytes):
        return done
    todo = pieces_after([memoryview(piece) for piece in pieces], done)
    while todo:
        step = call(fd, todo[:IOV_MAX], offset + done)
        if not step:
            break
        done += step
        todo = pieces_after(todo, step)
    return done


def pieces_after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """Return `views` without their first `nbytes`."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []


class RevokedError(Exception):
    """The memory was revoked, and was not touched after that."""


def copy_pieces(target: Pieces, source: Pieces) -> None:
    """Fill the pieces of `target` from those of `source`, which have at least as many bytes."""
    todo = pieces_after([memoryview(piece).cast("B") for piece in source], 0)
    for piece in target:
        view = memoryview(piece).cast("B")
        start = 0
        while start < view.nbytes:
            end = min(view.nbytes, start + todo[0].nbytes)
            view[start:end] = todo[0][: end - start]
            todo = pieces_after(todo, end - start)
            start = end


def digest_of(page: Pieces, skip: int = 0) -> int:
    state = xxhash.xxh3_64()
    for piece in pieces_after([memoryview(piece) for piece in page], skip):
        state.update(piece)
    return state.intdigest()


def nbytes_of(pieces: Iterable[Buffer]) -> int:
    return sum(memoryview(piece).nbytes for piece in pieces)


def verdict_by(deadline_s: float, call: Callable[[], int]) -> int:
    """Return the verdict of `call`. LATE after the deadline, REVOKED, or a negated errno."""
    if time.monotonic() > deadline_s:
        return LATE
    try:
        return call()
    except RevokedError:
        return REVOKED
    except OSError as error:
        return -(error.errno or 0)


def require(fits: bool) -> None:
    if not fits:
        raise ValueError("the sequences of a batch do not fit together")
