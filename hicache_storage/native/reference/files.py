"""Read, write, check and claim many files of one directory, in Python."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import xxhash

from hicache_storage.native.reference.pieces import (
    HIT,
    KEPT,
    MISS,
    UNSYNCED,
    WRONG,
    RevokedError,
    digest_of,
    move_all,
    nbytes_of,
    require,
    verdict_by,
)
from hicache_storage.native.reference.revocables import (
    read_revocable,
    states_of,
    write_revocable,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.native.reference.pieces import Pieces

TRAILER_NBYTES = 64
NAME_NBYTES = 40
"""The part of a trailer that names its page. The next byte is 1 if the page was synced first."""

_SEALED_NBYTES = 56
_MOST_AHEAD_NS = 300 * 10**9
"""A time that is further ahead than this cannot be true."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REWRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def exists_files(paths: Sequence[bytes], nbytes: int, deadline_s: float) -> list[int]:
    """Return HIT for each path that is a regular file of `nbytes`.

    Args:
        paths: The names of the files.
        nbytes: The size that a file must have.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.
    """
    return [verdict_by(deadline_s, partial(_exists, path, nbytes)) for path in paths]


def check_files(
    paths: Sequence[bytes],
    names: Sequence[bytes],
    nbytes: int,
    touched_ns: int,
    deadline_s: float,
) -> list[int]:
    """Return HIT or UNSYNCED for each file whose trailer, after `nbytes` of page, begins with its name.

    A file with a different trailer is WRONG. A hit gets the modification time `touched_ns`, unless
    that is negative.
    """
    require(len(paths) == len(names) and all(len(name) >= NAME_NBYTES for name in names))
    return [
        verdict_by(deadline_s, partial(_check, path, name, nbytes, touched_ns))
        for path, name in zip(paths, names, strict=True)
    ]


def read_files(
    paths: Sequence[bytes],
    names: Sequence[bytes],
    pages: Sequence[Pieces],
    nbytes: int,
    touched_ns: int,
    interval_ns: int,
    skip: int,
    deadline_s: float,
    states: Sequence[bytearray] = (),
) -> tuple[list[int], list[int]]:
    """Read each page that is complete, and verify it by its trailer.

    The trailer is read before and after the page. If both are equal, no writer changed the page
    meanwhile.

    Args:
        paths: The names of the files.
        names: The first 40 bytes that each trailer must have.
        pages: The memory of each page, `nbytes` each. Its content is undefined unless the verdict is
            HIT.
        nbytes: The size of a page, without its trailer.
        touched_ns: The modification time for the first file after a hit. Each later file gets one
            nanosecond less. Negative: leave the times as they are.
        interval_ns: Renew a modification time only if it is at least this old, or more than five
            minutes ahead.
        skip: How many leading bytes the digest of a page leaves out. Negative: no digests.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.
        states: One state for each page, empty for a page that is not revocable. Without any states, no
            page is revocable.

    Returns:
        The verdicts, and the xxh3-64 of each page that is a HIT (0 for the others). If a page's
        memory is revoked before the page is complete, the verdict is REVOKED.
    """
    fits = len(paths) == len(names) == len(pages) and all(
        len(name) >= NAME_NBYTES for name in names
    )
    require(fits and all(nbytes_of(page) == nbytes for page in pages))
    verdicts: list[int] = []
    values: list[int] = []
    for index, (path, name, page, state) in enumerate(
        zip(paths, names, pages, states_of(states, len(pages)), strict=True)
    ):
        when_ns = -1 if touched_ns < 0 else touched_ns - index
        memory = _Memory(page, state, skip)
        verdict = verdict_by(
            deadline_s, partial(_read, path, name, memory, nbytes, when_ns, interval_ns)
        )
        verdicts.append(verdict)
        values.append(memory.digest if verdict == HIT and skip >= 0 else 0)
    return verdicts, values


def write_files(
    paths: Sequence[bytes],
    targets: Sequence[bytes],
    trailers: Sequence[bytes],
    pages: Sequence[Pieces],
    nbytes: int,
    modified_ns: int,
    recycled: int,
    deadline_s: float,
    stop: bytearray,
    states: Sequence[bytearray] = (),
) -> list[int]:
    """Write each page and its trailer to its path, then rename the path to its target.

    Args:
        paths: The files to write. The first `recycled` of them are old pages to overwrite in place. The
            others are new.
        targets: The name that each file gets when it is complete.
        trailers: The 64 bytes after each page.
        pages: The bytes of each page, `nbytes` each.
        nbytes: The size of a page, without its trailer.
        modified_ns: The modification time of the first file. Each later file gets one nanosecond less.
        recycled: How many paths are overwritten.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.
        stop: One byte. Another thread sets it to 1 to end the batch.
        states: One state for each page, empty for a page that is not revocable. Without any states, no
            page is revocable.

    Returns:
        HIT if the page is stored under its name. KEPT if a file may not be overwritten, and it was
        not changed. REVOKED if the page's memory was revoked before the page was complete. After
        REVOKED or a negated errno, nothing is left at the path. A negated errno and `stop` end the
        batch: the remaining verdicts are MISS, and those files are unchanged.
    """
    require(len(paths) == len(targets) == len(trailers) == len(pages))
    require(all(len(trailer) >= TRAILER_NBYTES for trailer in trailers))
    require(all(nbytes_of(page) == nbytes for page in pages))
    verdicts = [MISS] * len(paths)
    for index, (path, target, trailer, page, state) in enumerate(
        zip(paths, targets, trailers, pages, states_of(states, len(pages)), strict=True)
    ):
        if any(stop):
            break
        memory = _Memory(page, state, -1)
        when_ns = modified_ns - index
        write = partial(
            _write, path, target, memory, trailer, nbytes, when_ns, recycled=index < recycled
        )
        verdicts[index] = verdict_by(deadline_s, write)
        if verdicts[index] < 0:
            break
    return verdicts


def claim_files(
    paths: Sequence[bytes],
    targets: Sequence[bytes],
    modified_ns: Sequence[int],
    nbytes: Sequence[int],
    kept_nbytes: int,
    most_kept: int,
    deadline_s: float,
) -> list[int]:
    """Take page files out of their key space by renaming each to a name of the caller's own.

    Args:
        paths: The files.
        targets: The name that each file gets.
        modified_ns: The modification time that each file must have.
        nbytes: The size that each file must have.
        kept_nbytes: The size of files that can be overwritten.
        most_kept: How many of these files may be kept at their targets.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.

    Returns:
        KEPT if the file is at its target, HIT if it was removed, MISS if it was gone or had a different
        time or size. A file with further names is not kept.
    """
    require(len(paths) == len(targets) == len(modified_ns) == len(nbytes))
    require(all(targets))
    verdicts: list[int] = []
    for path, target, time_ns, size in zip(paths, targets, modified_ns, nbytes, strict=True):
        keep = most_kept > 0 and size == kept_nbytes
        verdict = verdict_by(deadline_s, partial(_claim, path, target, time_ns, size, keep=keep))
        most_kept -= verdict == KEPT
        verdicts.append(verdict)
    return verdicts


# --- one file ------------------------------------------------------------------------------------


def _exists(path: bytes, nbytes: int) -> int:
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return MISS
    return HIT if stat.S_ISREG(status.st_mode) and status.st_size == nbytes else MISS


def _check(path: bytes, name: bytes, nbytes: int, touched_ns: int) -> int:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return MISS
    try:
        trailer = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
        if not _is_named(trailer, name):
            return WRONG
        if touched_ns >= 0:
            _touch(fd, touched_ns, 0)
        return HIT if trailer[NAME_NBYTES] else UNSYNCED
    finally:
        os.close(fd)


class _Memory:
    """The memory of one page, revocable or not."""

    def __init__(self, page: Pieces, state: bytearray, skip: int) -> None:
        self._page = page
        self._state = state
        self._skip = skip
        self.digest = 0

    def read(self, fd: int, nbytes: int) -> bytes:
        """Fill the page, and compute its digest. Return the trailer, or b"" if the file is too short."""
        if self._state:
            digest = read_revocable(os.preadv, fd, self._page, self._state, max(0, self._skip))
            self.digest = digest or 0
            return b"" if digest is None else os.pread(fd, TRAILER_NBYTES, nbytes)
        trailer = bytearray(TRAILER_NBYTES)
        wanted = nbytes + TRAILER_NBYTES
        if move_all(os.preadv, fd, [*self._page, trailer], wanted) != wanted:
            return b""
        if self._skip >= 0:
            self.digest = digest_of(self._page, self._skip)
        return bytes(trailer)

    def write(self, fd: int, nbytes: int, trailer: bytes) -> None:
        if self._state:
            write_revocable(os.pwritev, fd, self._page, self._state)
            os.pwrite(fd, trailer, nbytes)
        else:
            move_all(os.pwritev, fd, [*self._page, trailer], nbytes + TRAILER_NBYTES)


def _read(
    path: bytes, name: bytes, memory: _Memory, nbytes: int, touched_ns: int, interval_ns: int
) -> int:
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return MISS
    try:
        before = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
        if not _is_named(before, name):
            return WRONG
        if memory.read(fd, nbytes) != before:
            return MISS
        if touched_ns >= 0:
            _touch(fd, touched_ns, interval_ns)
        return HIT
    finally:
        os.close(fd)


def _write(
    path: bytes,
    target: bytes,
    memory: _Memory,
    trailer: bytes,
    nbytes: int,
    modified_ns: int,
    *,
    recycled: bool,
) -> int:
    try:
        fd = os.open(path, _REWRITE if recycled else _CREATE, 0o666)
    except OSError:
        if recycled:
            return KEPT
        raise
    try:
        try:
            if recycled and not _spoil(fd, nbytes):
                return KEPT
            memory.write(fd, nbytes, trailer[:TRAILER_NBYTES])
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)
        os.rename(path, target)
    except (OSError, RevokedError):
        with suppress(OSError):
            os.unlink(path)
        raise
    return HIT


def _spoil(fd: int, nbytes: int) -> bool:
    """Overwrite the trailer, so that a reader that has begun the page finds a different one afterwards.

    Return False and change nothing if the file has no page of this size, or one that was synced.
    """
    old = os.pread(fd, TRAILER_NBYTES + 1, nbytes)
    if len(old) != TRAILER_NBYTES or old[NAME_NBYTES]:
        return False
    os.pwrite(fd, bytes(TRAILER_NBYTES), nbytes)
    return True


def _claim(path: bytes, target: bytes, modified_ns: int, nbytes: int, *, keep: bool) -> int:
    try:
        status = os.stat(path, follow_symlinks=False)
        if (status.st_mtime_ns, status.st_size) != (modified_ns, nbytes):
            return MISS
        os.rename(path, target)
    except FileNotFoundError:
        return MISS
    if keep and status.st_nlink == 1:
        return KEPT
    with suppress(OSError):
        os.unlink(target)
    return HIT


def _touch(fd: int, touched_ns: int, interval_ns: int) -> None:
    """Set the modification time, or if only the owner may do that, the time of now.

    If that fails too, the file keeps its time.
    """
    with suppress(OSError):
        if interval_ns:
            age_ns = touched_ns - os.fstat(fd).st_mtime_ns
            if -_MOST_AHEAD_NS <= age_ns < interval_ns:
                return
        try:
            os.utime(fd, ns=(touched_ns, touched_ns))
        except PermissionError:
            os.utime(fd)


def _is_named(trailer: bytes, name: bytes) -> bool:
    return (
        len(trailer) == TRAILER_NBYTES
        and trailer[:NAME_NBYTES] == name[:NAME_NBYTES]
        and trailer[_SEALED_NBYTES:] == xxhash.xxh3_64_digest(trailer[:_SEALED_NBYTES])
    )
