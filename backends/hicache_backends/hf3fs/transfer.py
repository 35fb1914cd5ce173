"""Pages between memory and slots: neighbouring slots in one preadv or pwritev, around the page cache
where memory, size and file system allow it."""

from __future__ import annotations

import enum
import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_backends.hf3fs.slots import BLOCK_NBYTES, MARK_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.hf3fs.slot_files import OpenFiles, SlotFiles
    from hicache_backends.hf3fs.slots import Geometry
    from hicache_backends.hf3fs.usrbio import Usrbio
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

    Vectored: TypeAlias = Callable[[int, list[memoryview], int, Deadline], int]

logger = logging.getLogger(__name__)

_IOV_MAX = 1024
_RUN_NBYTES = 8 << 20
_RUN_SLOTS = 64
# A mark and what fills its block; behind a page that is no whole block that may be two blocks' worth.
_STRIDE_NBYTES = 3 * BLOCK_NBYTES


# Errors that refuse a write, or come before it. After any other one a file system that is not this
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
    """All of it was written; or read, between the right marks."""
    WRONG = enum.auto()
    """It was read, and the marks are not those of the page."""
    NOT_MOVED = enum.auto()
    """It was not tried, or failed, and nothing of it happens later."""
    IN_DOUBT = enum.auto()
    """It failed, and some of it may be written later."""


class Item(NamedTuple):
    """A page, the slot that it is in or goes to, and the mark that it has there."""

    slot: int
    mark: bytes
    page: Page


class _Run(NamedTuple):
    """Neighbouring slots of one file."""

    items: list[Item]
    direct: bool


class _Way(NamedTuple):
    """How the bytes of one call are moved."""

    call: Vectored
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
        """A kernel waits for what it has begun on its own devices, whatever came of it."""
        self._direct = direct and usrbio is None
        self._counters = counters
        self._scratches: list[memoryview] = []

    def close(self) -> None:
        """Give everything back."""
        if self._usrbio is not None:
            self._usrbio.close()

    def read(self, files: SlotFiles, items: Sequence[Item], deadline: Deadline) -> list[Outcome]:
        """Fill the pages."""
        return self._through(files, items, deadline, writing=False)

    def write(self, files: SlotFiles, items: Sequence[Item], deadline: Deadline) -> list[Outcome]:
        """Fill the slots."""
        return self._through(files, items, deadline, writing=True)

    def _through(
        self, files: SlotFiles, items: Sequence[Item], deadline: Deadline, *, writing: bool
    ) -> list[Outcome]:
        by = self._usrbio or _Kernel
        call: Vectored = by.pwritev if writing else by.preadv
        scratch = self._scratch()
        done: list[Outcome] = []
        order = sorted(range(len(items)), key=lambda number: items[number].slot)
        with files.opened(writing=writing) as opened:
            way = _Way(call, deadline, writing, self.is_certain)
            step = _Step(files.geometry, opened, scratch, self._counters, way)
            for run in self._runs(files.geometry, [items[number] for number in order]):
                done += step.run(run)
        self._scratches.append(scratch)
        verdicts = dict(zip(order, done, strict=True))
        return [verdicts[number] for number in range(len(items))]

    def _scratch(self) -> memoryview:
        """Memory for the marks of one call."""
        try:
            return self._scratches.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, _RUN_SLOTS * _STRIDE_NBYTES))

    def _runs(self, geometry: Geometry, items: Sequence[Item]) -> Iterator[_Run]:
        """`items`, which are in the order of their slots, in as few calls as can be."""
        most = max(1, min(_RUN_SLOTS, _RUN_NBYTES // geometry.slot_nbytes))
        run: list[Item] = []
        run_direct = False
        iovs = 0
        for item in items:
            direct = self._direct and geometry.is_blocks and _is_aligned(item.page)
            size = len(item.page.segments) + 2
            if run and (
                item.slot != run[-1].slot + 1
                or item.slot % geometry.slots_per_file == 0
                or direct != run_direct
                or len(run) == most
                or iovs + size > _IOV_MAX
            ):
                yield _Run(run, run_direct)
                run, iovs = [], 0
            run_direct = direct
            run.append(item)
            iovs += size
        if run:
            yield _Run(run, run_direct)


class _Step:
    """The runs of one call."""

    def __init__(
        self,
        geometry: Geometry,
        opened: OpenFiles,
        scratch: memoryview,
        counters: Counters,
        way: _Way,
    ) -> None:
        self._geometry = geometry
        self._opened = opened
        self._scratch = scratch
        self._counters = counters
        self._call, self._deadline, self._writing, self._is_certain = way

    def run(self, run: _Run) -> list[Outcome]:
        """Move the items; one that fails is no other one's failure."""
        if self._deadline.passed():
            self._counters.add("timeouts", len(run.items))
            return [Outcome.NOT_MOVED] * len(run.items)
        try:
            return self._moved(run)
        except OSError as error:
            if run.direct and error.errno == errno.EINVAL:
                return self.run(_Run(run.items, direct=False))
            in_doubt = self._is_in_doubt(error)
            if in_doubt or len(run.items) == 1:
                self._note(error, len(run.items))
                return [Outcome.IN_DOUBT if in_doubt else Outcome.NOT_MOVED] * len(run.items)
        return [self.run(_Run([item], run.direct))[0] for item in run.items]

    def _moved(self, run: _Run) -> list[Outcome]:
        number, offset = self._geometry.position(run.items[0].slot)
        descriptor = self._opened.descriptor(number, direct=run.direct)
        buffers: list[memoryview] = []
        for index, item in enumerate(run.items):
            lead, tail = self._margins(index)
            if self._writing:
                lead[:] = item.mark.ljust(len(lead), b"\0")
                tail[:] = item.mark.ljust(len(tail), b"\0")
            buffers += [lead, *item.page.segments, tail]
        done = self._whole(descriptor, buffers, offset)
        whole = done // self._geometry.slot_nbytes
        return [
            self._outcome(index, item) if index < whole else self._cut_off
            for index, item in enumerate(run.items)
        ]

    @property
    def _cut_off(self) -> Outcome:
        """What comes of an item behind the end of the file."""
        return Outcome.NOT_MOVED if self._writing else Outcome.WRONG

    def _outcome(self, index: int, item: Item) -> Outcome:
        if self._writing or self._is_marked(index, item):
            return Outcome.MOVED
        return Outcome.WRONG

    def _whole(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        """Move all of `buffers`, whatever is done in one call; fewer bytes where the file ends."""
        wanted, done = sum(map(len, buffers)), 0
        while done < wanted:
            rest = _after(buffers, done)[:_IOV_MAX] if done else buffers[:_IOV_MAX]
            step = self._call(descriptor, rest, offset + done, self._deadline)
            if not step:
                break
            done += step
        return done

    def _margins(self, index: int) -> tuple[memoryview, memoryview]:
        """The memory of what lies in front of a page and behind it."""
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
    """Reads and writes by way of the mount."""

    @staticmethod
    def preadv(descriptor: int, buffers: list[memoryview], offset: int, _: Deadline) -> int:
        return os.preadv(descriptor, buffers, offset)

    @staticmethod
    def pwritev(descriptor: int, buffers: list[memoryview], offset: int, _: Deadline) -> int:
        return os.pwritev(descriptor, buffers, offset)


def _after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """`views` without their first `nbytes`."""
    for index, view in enumerate(views):
        if nbytes < len(view):
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= len(view)
    return []


def _is_aligned(page: Page) -> bool:
    return all(
        address % BLOCK_NBYTES == 0 and nbytes % BLOCK_NBYTES == 0
        for address, nbytes in page.addresses
    )
