"""Pages between memory and slots: neighbouring slots in one preadv or pwritev, around the page cache
where memory, size and file system allow it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from hicache_backends.hf3fs._slot import BLOCK_NBYTES, MARK_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.hf3fs._slot import Geometry
    from hicache_backends.hf3fs._slot_files import OpenFiles, SlotFiles
    from hicache_backends.hf3fs._usrbio import Usrbio
    from hicache_storage.counters import Counters
    from hicache_storage.page import Page

    Vectored: TypeAlias = Callable[[int, list[memoryview], int], int]

logger = logging.getLogger(__name__)

_IOV_MAX = 1024
_RUN_NBYTES = 8 << 20
_RUN_SLOTS = 64
# A mark and what fills its block; behind a page that is no whole block that may be two blocks' worth.
_STRIDE_NBYTES = 3 * BLOCK_NBYTES


class Item(NamedTuple):
    """A page, the slot that it is in or goes to, and the mark that it has there."""

    slot: int
    mark: bytes
    page: Page


class _Run(NamedTuple):
    """Neighbouring slots of one file."""

    items: list[Item]
    direct: bool


class Transfers:
    """Reads and writes of slots. Thread-safe."""

    def __init__(self, counters: Counters, usrbio: Usrbio | None, *, direct: bool) -> None:
        self._usrbio = usrbio
        self._direct = direct and usrbio is None
        self._counters = counters
        self._scratches: list[memoryview] = []

    def close(self) -> None:
        """Give everything back."""
        if self._usrbio is not None:
            self._usrbio.close()

    def read(self, files: SlotFiles, items: Sequence[Item], deadline_s: float) -> list[bool | None]:
        """Fill the pages. True: both marks were right; None: it was not tried, or could not be."""
        return self._through(files, items, deadline_s, writing=False)

    def write(self, files: SlotFiles, items: Sequence[Item], deadline_s: float) -> list[bool]:
        """Fill the slots. True: all of it was written."""
        return [done is True for done in self._through(files, items, deadline_s, writing=True)]

    def _through(
        self, files: SlotFiles, items: Sequence[Item], deadline_s: float, *, writing: bool
    ) -> list[bool | None]:
        by = self._usrbio or os
        call: Vectored = by.pwritev if writing else by.preadv
        scratch = self._scratch()
        done: list[bool | None] = []
        order = sorted(range(len(items)), key=lambda number: items[number].slot)
        with files.opened(writing=writing) as opened:
            step = _Step(files.geometry, opened, scratch, self._counters, call, writing=writing)
            for run in self._runs(files.geometry, [items[number] for number in order]):
                if time.monotonic() > deadline_s:
                    self._counters.add("timeouts", len(run.items))
                    done += [None] * len(run.items)
                else:
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
        call: Vectored,
        *,
        writing: bool,
    ) -> None:
        self._geometry = geometry
        self._opened = opened
        self._scratch = scratch
        self._counters = counters
        self._writing = writing
        self._call = call

    def run(self, run: _Run) -> list[bool | None]:
        """What came of each item; one that fails is no other one's failure."""
        try:
            return self._moved(run)
        except OSError as error:
            if run.direct and error.errno == errno.EINVAL:
                return self.run(_Run(run.items, direct=False))
            if len(run.items) == 1:
                self._note(error)
                return [None]
        return [self.run(_Run([item], run.direct))[0] for item in run.items]

    def _moved(self, run: _Run) -> list[bool | None]:
        number, offset = self._geometry.position(run.items[0].slot)
        descriptor = self._opened.descriptor(number, direct=run.direct)
        buffers: list[memoryview] = []
        for index, item in enumerate(run.items):
            lead, tail = self._margins(index)
            if self._writing:
                lead[:] = item.mark.ljust(len(lead), b"\0")
                tail[:] = item.mark.ljust(len(tail), b"\0")
            buffers += [lead, *item.page.segments, tail]
        done = _whole(self._call, descriptor, buffers, offset)
        whole = done // self._geometry.slot_nbytes
        return [
            index < whole and (self._writing or self._is_marked(index, item))
            for index, item in enumerate(run.items)
        ]

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

    def _note(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            self._counters.add("refused_no_space")
        elif not isinstance(error, FileNotFoundError):
            self._counters.add("io_errors")
        logger.debug("a slot was not %s: %s", "written" if self._writing else "read", error)


def _whole(call: Vectored, descriptor: int, buffers: list[memoryview], offset: int) -> int:
    """Move all of `buffers`, whatever the kernel does in one call; fewer bytes where the file ends."""
    wanted = sum(map(len, buffers))
    done = call(descriptor, buffers[:_IOV_MAX], offset)
    while done < wanted:
        step = call(descriptor, _after(buffers, done)[:_IOV_MAX], offset + done)
        if not step:
            break
        done += step
    return done


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
