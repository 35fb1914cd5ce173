"""Transfers of pages between memory and slots: neighbouring slots in one preadv or pwritev, around the
page cache where memory, size and file system allow it."""

from __future__ import annotations

import enum
import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_backends.hf3fs.layout import BLOCK_NBYTES, MARK_NBYTES
from hicache_storage.backend_support.vectored_io import IOV_MAX, is_aligned, move_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.hf3fs.layout import Geometry
    from hicache_backends.hf3fs.slots import OpenFiles, SlotFiles
    from hicache_backends.hf3fs.usrbio import Usrbio
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

    VectoredCall: TypeAlias = Callable[[int, list[memoryview], int, Deadline], int]

logger = logging.getLogger(__name__)

_RUN_NBYTES = 8 << 20
_RUN_SLOTS = 64
# A mark and the rest of its block. Behind a page that is no whole block that may be two blocks.
_STRIDE_NBYTES = 3 * BLOCK_NBYTES

# Errors that refuse a write, or come before it. After any other error a file system that is not this
# machine's alone may carry the write out later: the request may lie in a queue of a server.
_REFUSED = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
        *(errno.EINVAL, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR),
        *(errno.EMFILE, errno.ENFILE),
    }
)


class Outcome(enum.Enum):
    """The end of one item of a batch."""

    MOVED = enum.auto()
    """The item was written as a whole; or read as a whole, between the right marks."""
    WRONG = enum.auto()
    """The item was read, and the marks are not those of the page."""
    NOT_MOVED = enum.auto()
    """The item was not tried, or failed, and no part of it is written later."""
    IN_DOUBT = enum.auto()
    """The item failed, and a part of it may be written later."""


class Item(NamedTuple):
    """A page, its slot, and its mark in that slot."""

    slot: int
    mark: bytes
    page: Page


class _Run(NamedTuple):
    """Neighbouring slots of one file."""

    items: list[Item]
    direct: bool


class _Call(NamedTuple):
    """The means and the conditions of one call."""

    move: VectoredCall
    deadline: Deadline
    writing: bool
    is_certain: bool


class Transfers:
    """Reads and writes of slots. Thread-safe."""

    def __init__(
        self, counters: Counters, usrbio: Usrbio | None, *, direct: bool, local: bool
    ) -> None:
        self._usrbio = usrbio
        self.is_certain = local and usrbio is None
        """True when a call that failed writes nothing later. A kernel waits for its own devices."""
        self._direct = direct and usrbio is None
        self._counters = counters
        self._scratches: list[memoryview] = []

    def close(self) -> None:
        """Free the rings and their memory."""
        if self._usrbio is not None:
            self._usrbio.close()

    def read(self, files: SlotFiles, items: Sequence[Item], deadline: Deadline) -> list[Outcome]:
        """Fill the pages from their slots."""
        return self._move(files, items, deadline, writing=False)

    def write(self, files: SlotFiles, items: Sequence[Item], deadline: Deadline) -> list[Outcome]:
        """Fill the slots from their pages."""
        return self._move(files, items, deadline, writing=True)

    def _move(
        self, files: SlotFiles, items: Sequence[Item], deadline: Deadline, *, writing: bool
    ) -> list[Outcome]:
        by = self._usrbio or _Kernel
        move: VectoredCall = by.pwritev if writing else by.preadv
        call = _Call(move, deadline, writing, self.is_certain)
        scratch = self._take_scratch()
        done: list[Outcome] = []
        order = sorted(range(len(items)), key=lambda number: items[number].slot)
        with files.opened(writing=writing) as opened:
            mover = _RunMover(files.geometry, opened, scratch, self._counters, call)
            for run in self._runs(files.geometry, [items[number] for number in order]):
                done += mover.move(run)
        self._scratches.append(scratch)
        outcomes = dict(zip(order, done, strict=True))
        return [outcomes[number] for number in range(len(items))]

    def _take_scratch(self) -> memoryview:
        """Return memory for the marks of one call."""
        try:
            return self._scratches.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, _RUN_SLOTS * _STRIDE_NBYTES))

    def _runs(self, geometry: Geometry, items: Sequence[Item]) -> Iterator[_Run]:
        """Yield `items`, which are in the order of their slots, in as few runs as possible."""
        most = max(1, min(_RUN_SLOTS, _RUN_NBYTES // geometry.slot_nbytes))
        run: list[Item] = []
        run_direct = False
        buffers = 0
        for item in items:
            direct = self._direct and geometry.is_blocks and is_aligned(item.page)
            size = len(item.page.segments) + 2
            if run and (
                item.slot != run[-1].slot + 1
                or item.slot % geometry.slots_per_file == 0
                or direct != run_direct
                or len(run) == most
                or buffers + size > IOV_MAX
            ):
                yield _Run(run, run_direct)
                run, buffers = [], 0
            run_direct = direct
            run.append(item)
            buffers += size
        if run:
            yield _Run(run, run_direct)


class _RunMover:
    """Moves the runs of one call."""

    def __init__(
        self,
        geometry: Geometry,
        opened: OpenFiles,
        scratch: memoryview,
        counters: Counters,
        call: _Call,
    ) -> None:
        self._geometry = geometry
        self._opened = opened
        self._scratch = scratch
        self._counters = counters
        self._call, self._deadline, self._writing, self._is_certain = call

    def move(self, run: _Run) -> list[Outcome]:
        """Move the items. If a run fails without doubt, its items are moved one by one."""
        if self._deadline.passed():
            self._counters.add("timeouts", len(run.items))
            return [Outcome.NOT_MOVED] * len(run.items)
        try:
            return self._move_together(run)
        except OSError as error:
            if run.direct and error.errno == errno.EINVAL:
                return self.move(_Run(run.items, direct=False))
            in_doubt = self._is_in_doubt(error)
            if in_doubt or len(run.items) == 1:
                self._note(error, len(run.items))
                return [Outcome.IN_DOUBT if in_doubt else Outcome.NOT_MOVED] * len(run.items)
        return [self.move(_Run([item], run.direct))[0] for item in run.items]

    def _move_together(self, run: _Run) -> list[Outcome]:
        number, offset = self._geometry.position(run.items[0].slot)
        fd = self._opened.descriptor(number, direct=run.direct)
        buffers: list[memoryview] = []
        for index, item in enumerate(run.items):
            lead, tail = self._margins(index)
            if self._writing:
                lead[:] = item.mark.ljust(len(lead), b"\0")
                tail[:] = item.mark.ljust(len(tail), b"\0")
            buffers += [lead, *item.page.segments, tail]
        done = move_all(self._call_once, fd, buffers, sum(map(len, buffers)), offset)
        whole = done // self._geometry.slot_nbytes
        return [
            self._outcome(index, item) if index < whole else self._cut_off
            for index, item in enumerate(run.items)
        ]

    def _call_once(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return self._call(fd, buffers, offset, self._deadline)

    @property
    def _cut_off(self) -> Outcome:
        """The outcome of an item behind the end of the file."""
        return Outcome.NOT_MOVED if self._writing else Outcome.WRONG

    def _outcome(self, index: int, item: Item) -> Outcome:
        if self._writing or self._is_marked(index, item):
            return Outcome.MOVED
        return Outcome.WRONG

    def _margins(self, index: int) -> tuple[memoryview, memoryview]:
        """Return the memory for the bytes in front of a page, and for the bytes behind it."""
        start = index * _STRIDE_NBYTES
        middle = start + BLOCK_NBYTES
        return (
            self._scratch[start : start + self._geometry.lead_nbytes],
            self._scratch[middle : middle + self._geometry.tail_nbytes],
        )

    def _is_marked(self, index: int, item: Item) -> bool:
        lead, tail = self._margins(index)
        return bytes(lead[:MARK_NBYTES]) == item.mark == bytes(tail[:MARK_NBYTES])

    def _is_in_doubt(self, error: OSError) -> bool:
        return self._writing and not self._is_certain and error.errno not in _REFUSED

    def _note(self, error: OSError, count: int) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self._counters.add("refused_no_space", count)
        elif not isinstance(error, FileNotFoundError):
            self._counters.add("io_errors", count)
        logger.debug("a slot was not %s: %s", "written" if self._writing else "read", error)


class _Kernel:
    """Reads and writes through the mount."""

    @staticmethod
    def preadv(fd: int, buffers: list[memoryview], offset: int, _: Deadline) -> int:
        return os.preadv(fd, buffers, offset)

    @staticmethod
    def pwritev(fd: int, buffers: list[memoryview], offset: int, _: Deadline) -> int:
        return os.pwritev(fd, buffers, offset)
