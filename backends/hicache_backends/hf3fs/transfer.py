"""Move pages between memory and slots, with one call of the data plane per batch.

Transfers bypass the page cache if memory, size and file system allow it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hicache_storage import native
from hicache_storage.backend_support.revocable import states_of
from hicache_storage.backend_support.vectored_io import DIRECT_ALIGNMENT
from hicache_storage.native import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.hf3fs.slot_files import SlotFiles
    from hicache_backends.hf3fs.usrbio import Usrbio
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

    VectoredCall: TypeAlias = Callable[[int, list[memoryview], int, Deadline], int]

logger = logging.getLogger(__name__)

_RUN_NBYTES = 8 << 20
# A page that is hashed, or copied through a scratch buffer, in parts of this size is still in the
# processor's cache.
_CACHED_RUN_NBYTES = 256 << 10
# Measured on a virtual disk with O_DIRECT: revocable pages moved faster in parts of this size than
# in larger ones, whose scratch buffer is new memory for each call. A page of 1 MiB with its frame and
# marks is one part.
_SCRATCH_RUN_NBYTES = (1 << 20) + 4 * DIRECT_ALIGNMENT

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors that refuse a write, or come before it. After any other error, a file system that does not
# belong to this machine alone may carry the write out later, because the request may be in a
# server's queue.
_REFUSED = _NO_SPACE | {
    *(errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR),
    *(errno.EMFILE, errno.ENFILE),
}
_ALL = frozenset(range(256))


class SlotPages(NamedTuple):
    """Pages, their slots, and their marks in the slots."""

    slots: list[int]
    marks: list[bytes]
    pages: list[Page]

    def taken(self, numbers: Sequence[int]) -> SlotPages:
        """Return the pages at these positions, in this order, with their slots and marks."""
        return SlotPages(
            [self.slots[number] for number in numbers],
            [self.marks[number] for number in numbers],
            [self.pages[number] for number in numbers],
        )


class Transfers:
    """The transfers of one mount, which read and write slots. Thread-safe."""

    def __init__(
        self, counters: Counters, usrbio: Usrbio | None, *, direct: bool, local: bool
    ) -> None:
        self._usrbio = usrbio
        self.is_certain = local and usrbio is None
        """True if a failed call writes nothing later, because the kernel waits for local devices."""
        self._direct = direct and usrbio is None
        self._counters = counters

    def close(self) -> None:
        """Free the rings and their memory."""
        if self._usrbio is not None:
            self._usrbio.close()

    def read(self, files: SlotFiles, items: SlotPages, deadline: Deadline) -> list[int]:
        """Fill the pages from their slots. Return the verdicts of the data plane.

        Compute the digest of each page that needs one.
        """
        return self._move(files, items, deadline, writing=False)

    def write(self, files: SlotFiles, items: SlotPages, deadline: Deadline) -> list[int]:
        """Fill the slots from their pages. Return the verdicts of the data plane."""
        return self._move(files, items, deadline, writing=True)

    def is_in_doubt(self, verdict: int) -> bool:
        """Return True if part of the page may still be written after this verdict."""
        return verdict < 0 and not self.is_certain and -verdict not in _REFUSED

    # --- parts ---------------------------------------------------------------------------------------

    def _move(
        self, files: SlotFiles, items: SlotPages, deadline: Deadline, *, writing: bool
    ) -> list[int]:
        verdicts = [native.MISS] * len(items.slots)
        # Neighbors are moved together.
        todo = sorted(range(len(verdicts)), key=items.slots.__getitem__)
        for direct in (True, False) if self._direct and files.geometry.is_blocks else (False,):
            call = _Call(files, deadline, writing=writing, direct=direct)
            for number, verdict in zip(todo, self._try(call, items.taken(todo)), strict=True):
                verdicts[number] = verdict
            # The memory of these pages is not aligned, or the file system refuses O_DIRECT.
            todo = [number for number in todo if verdicts[number] == -errno.EINVAL]
            if not todo:
                break
        self._count(verdicts, "written" if writing else "read")
        return verdicts

    def _try(self, call: _Call, items: SlotPages) -> list[int]:
        if not call.writing:
            return self._read(call, items)
        verdicts = self._write(call, items)
        if -errno.ENOENT in verdicts:
            call.files.make_directory()
            return self._write(call, items)
        return verdicts

    def _read(self, call: _Call, items: SlotPages) -> list[int]:
        skip = items.pages[0].digest_skip if items.pages else None
        states = states_of(items.pages)
        run_nbytes = self._run_nbytes(call, hashed=skip is not None, revocable=bool(states))
        read: Any = native.read_slots
        if self._usrbio is not None:
            read = partial(reference.read_slots, move=call.by_deadline(self._usrbio.preadv))
        verdicts: list[int]
        verdicts, digests = read(
            *call.slots(items, run_nbytes, _ALL),
            -1 if skip is None else skip,
            call.deadline.end_s,
            states,
        )
        if skip is not None:
            for page, verdict, digest in zip(items.pages, verdicts, digests, strict=True):
                if verdict == native.HIT:
                    page.digest = digest
        return verdicts

    def _write(self, call: _Call, items: SlotPages) -> list[int]:
        alone = _ALL if self.is_certain else _REFUSED
        write: Any = native.write_slots
        if self._usrbio is not None:
            write = partial(reference.write_slots, move=call.by_deadline(self._usrbio.pwritev))
        states = states_of(items.pages)
        run_nbytes = self._run_nbytes(call, hashed=False, revocable=bool(states))
        verdicts: list[int] = write(
            *call.slots(items, run_nbytes, alone), call.deadline.end_s, states
        )
        return verdicts

    def _run_nbytes(self, call: _Call, *, hashed: bool, revocable: bool) -> int:
        """Return the largest size of a system call. Small calls are cheap only in a page cache."""
        if (hashed or revocable) and self.is_certain and not call.direct:
            return _CACHED_RUN_NBYTES
        return _SCRATCH_RUN_NBYTES if revocable and self._usrbio is None else _RUN_NBYTES

    def _count(self, verdicts: list[int], done: str) -> None:
        if verdicts.count(native.HIT) == len(verdicts):
            return
        for verdict, count in Counter(verdicts).items():
            if verdict == native.LATE:
                self._counters.add("timeouts", count)
            elif -verdict in _NO_SPACE:
                self._counters.add("refused_no_space", count)
            elif verdict < 0 and verdict != -errno.ENOENT:
                self._counters.add("io_errors", count)
            if verdict < 0:
                logger.debug("%d slots were not %s: %s", count, done, os.strerror(-verdict))


class _Call(NamedTuple):
    """The files and the conditions of one call."""

    files: SlotFiles
    deadline: Deadline
    writing: bool
    direct: bool

    def slots(self, items: SlotPages, run_nbytes: int, alone: frozenset[int]) -> tuple[Any, ...]:
        """Return the arguments that reads and writes of slots have in common."""
        return (
            *self.files.arguments(items.slots, writing=self.writing, direct=self.direct),
            [page.segments for page in items.pages],
            items.marks,
            self.files.geometry.shape,
            DIRECT_ALIGNMENT if self.direct else 1,
            run_nbytes,
            bytes(alone - {errno.EINVAL} if self.direct else alone),
        )

    def by_deadline(self, move: VectoredCall) -> Callable[[int, list[memoryview], int], int]:
        """Return a function like os.preadv or os.pwritev, which calls `move` with this deadline."""
        return lambda fd, buffers, offset: move(fd, buffers, offset, self.deadline)
