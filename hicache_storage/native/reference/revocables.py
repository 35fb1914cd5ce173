"""Access memory that its owner can take back at any time, in Python.

The state of a revocable is 8 bytes in native byte order: the number of accesses in progress, and a bit
that is set when it is revoked.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import TYPE_CHECKING

import xxhash

from hicache_storage.native.reference.pieces import (
    HIT,
    REVOKED,
    RevokedError,
    copy_pieces,
    digest_of,
    move_all,
    nbytes_of,
    pieces_after,
    require,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from hicache_storage.native.reference.pieces import Pieces

CHUNK_NBYTES = 256 << 10
"""The most bytes that one access handles."""

_STATE = struct.Struct("=Q")
_REVOKED = 1 << 63


class _Accesses:
    """The lock for all states. A forked child gets a new lock, because its parent's may be held."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.changed = threading.Condition()


_ACCESSES = _Accesses()
os.register_at_fork(after_in_child=_ACCESSES.renew)


def begin_access(state: bytearray) -> bool:
    """Count one access, and return True. Return False if the state is revoked.

    The caller must end the access soon: it may copy a chunk, but make no system call.
    """
    require(len(state) == _STATE.size)
    with _ACCESSES.changed:
        (value,) = _STATE.unpack(state)
        if value & _REVOKED:
            return False
        _STATE.pack_into(state, 0, value + 1)
        return True


def end_access(state: bytearray) -> None:
    """End an access that `begin_access` began."""
    require(len(state) == _STATE.size)
    with _ACCESSES.changed:
        (value,) = _STATE.unpack(state)
        _STATE.pack_into(state, 0, value - 1)
        _ACCESSES.changed.notify_all()


def is_revoked(state: bytearray) -> bool:
    """Return True if the state is revoked. Memory that is not revocable has an empty state."""
    return bool(state) and bool(_STATE.unpack(state)[0] & _REVOKED)


def revoke_access(state: bytearray) -> None:
    """Refuse accesses from now on. Return when no access is in progress any more."""
    require(len(state) == _STATE.size)
    with _ACCESSES.changed:
        (value,) = _STATE.unpack(state)
        _STATE.pack_into(state, 0, value | _REVOKED)
        _ACCESSES.changed.wait_for(lambda: _STATE.unpack(state)[0] == _REVOKED)


def digests(pages: Sequence[Pieces], states: Sequence[bytearray] = ()) -> list[int | None]:
    """Return the xxh3-64 of each page, over the bytes of its pieces in order. None if revoked.

    `states` has one state for each page, empty for a page that is not revocable. Without any states,
    no page is revocable. A page counts as revoked if it is revoked before all of it is hashed.
    """
    return [
        _digest(page, state) if state else digest_of(page)
        for page, state in zip(pages, states_of(states, len(pages)), strict=True)
    ]


def copy_revocable(
    targets: Sequence[Pieces],
    sources: Sequence[Pieces],
    states: Sequence[bytearray],
    skip: int = -1,
    far: bool = False,  # noqa: ARG001, FBT002 - positional in the compiled module
) -> tuple[list[int], list[int]]:
    """Copy the bytes of pages as `copy_pages` does, within accesses.

    `states` is as for `digests`. It guards both sides of a page.

    Returns:
        A verdict on each page, HIT or REVOKED, and the digest of each page, 0 if there is none.

    Raises:
        ValueError: A page and its target have different sizes. Nothing was copied.
    """
    if list(map(nbytes_of, targets)) != list(map(nbytes_of, sources)):
        raise ValueError("targets and sources do not fit together")
    found = [
        _copied(target, source, state, skip)
        for target, source, state in zip(
            targets, sources, states_of(states, len(targets)), strict=True
        )
    ]
    return [verdict for verdict, _ in found], [digest for _, digest in found]


def states_of(states: Sequence[bytearray], count: int) -> Sequence[bytearray]:
    """Return one state for each page, empty for a page that is not revocable."""
    require(len(states) in (0, count) and all(len(state) in (0, _STATE.size) for state in states))
    return states or [bytearray()] * count


def read_revocable(
    move: Callable[[int, Any, int], int], fd: int, page: Pieces, state: bytearray, skip: int
) -> int | None:
    """Read a page into revocable memory. Return its digest without `skip` bytes. None if the file ends.

    Raises:
        RevokedError: The memory was revoked.
    """
    hashed = xxhash.xxh3_64()
    offset = 0
    scratch = memoryview(bytearray(CHUNK_NBYTES))
    for chunk in chunks_of(page):
        part = scratch[: nbytes_of(chunk)]
        if move_all(move, fd, [part], part.nbytes, offset) < part.nbytes:
            return None
        _copy(state, chunk, part, writing=False)
        hashed.update(part[max(0, skip - offset) :])
        offset += part.nbytes
    return hashed.intdigest()


def write_revocable(
    move: Callable[[int, Any, int], int], fd: int, page: Pieces, state: bytearray
) -> None:
    """Write a page from revocable memory.

    Raises:
        RevokedError: The memory was revoked. A part of the page may have been written.
    """
    offset = 0
    scratch = memoryview(bytearray(CHUNK_NBYTES))
    for chunk in chunks_of(page):
        part = scratch[: nbytes_of(chunk)]
        _copy(state, chunk, part, writing=True)
        move_all(move, fd, [part], part.nbytes, offset)
        offset += part.nbytes


def copy_page(state: bytearray, page: Pieces, memory: memoryview, *, writing: bool) -> None:
    """Copy a page to `memory` if `writing` is True, else fill the page from `memory`.

    If `state` is not empty, each chunk is copied within one access.

    Raises:
        RevokedError: The memory of the page was revoked.
    """
    start = 0
    for chunk in chunks_of(page):
        part = memory[start : start + nbytes_of(chunk)]
        _copy(state, chunk, part, writing=writing)
        start += part.nbytes


def _digest(page: Pieces, state: bytearray) -> int | None:
    hashed = xxhash.xxh3_64()
    for chunk in chunks_of(page):
        if not begin_access(state):
            return None
        try:
            for piece in chunk:
                hashed.update(piece)
        finally:
            end_access(state)
    return hashed.intdigest()


def _copied(target: Pieces, source: Pieces, state: bytearray, skip: int) -> tuple[int, int]:
    rest = [memoryview(piece).cast("B") for piece in source]
    hashed = xxhash.xxh3_64()
    start = 0
    for chunk in chunks_of(target):
        if state and not begin_access(state):
            return REVOKED, 0
        try:
            copy_pieces(chunk, rest)
            for piece in pieces_after(chunk, max(0, skip - start)) if skip >= 0 else ():
                hashed.update(piece)
        finally:
            if state:
                end_access(state)
        start += nbytes_of(chunk)
        rest = pieces_after(rest, nbytes_of(chunk))
    return HIT, hashed.intdigest() if skip >= 0 else 0


def chunks_of(page: Pieces) -> Iterator[list[memoryview]]:
    """Yield a page's pieces, cut into chunks."""
    todo = pieces_after([memoryview(piece).cast("B") for piece in page], 0)
    while todo:
        chunk: list[memoryview] = []
        room = CHUNK_NBYTES
        for piece in todo:
            chunk.append(piece[:room])
            room -= chunk[-1].nbytes
            if not room:
                break
        todo = pieces_after(todo, CHUNK_NBYTES - room)
        yield chunk


def _copy(state: bytearray, chunk: list[memoryview], scratch: memoryview, *, writing: bool) -> None:
    """Copy one chunk of a page from or to its pieces, within one access."""
    if state and not begin_access(state):
        raise RevokedError
    try:
        start = 0
        for piece in chunk:
            end = start + piece.nbytes
            if writing:
                scratch[start:end] = piece
            else:
                piece[:] = scratch[start:end]
            start = end
    finally:
        if state:
            end_access(state)
