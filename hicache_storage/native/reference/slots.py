"""Read, write and check many slots of large files, in Python.

A slot consists of a lead, a page and a tail. Lead and tail begin with the page's mark, and zeros follow.
If a slot has the right mark at both places, it holds the whole page.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeAlias

from hicache_storage.native.reference.pieces import (
    HIT,
    IOV_MAX,
    LATE,
    MISS,
    REVOKED,
    WRONG,
    RevokedError,
    digest_of,
    move_all,
    nbytes_of,
    require,
    verdict_by,
)
from hicache_storage.native.reference.revocables import copy_page, is_revoked, states_of
from hicache_storage.page import address_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from hicache_storage.native.reference.pieces import Pieces

    Move: TypeAlias = Callable[[int, Any, int], int]
    """os.preadv, os.pwritev, or a function with the same arguments."""

    Files: TypeAlias = tuple[str, Sequence[bytes], int]
    """A directory, the names of files in it, and the flags of os.open."""

MARK_MOST_NBYTES = 256
_SLOTS_A_RUN = 64


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


def check_slots(
    files: Files,
    numbers: Sequence[int],
    offsets: Sequence[int],
    marks: Sequence[bytes],
    last_offset: int,
    deadline_s: float,
) -> list[int]:
    """Return HIT for each slot that has its mark at both places, and WRONG for all others.

    Args:
        files: The files, which this call opens. Neither the directory nor a file may be a link. If a
            file cannot be opened, the verdict for its slots is a negated errno.
        numbers: The file of each slot, as an index among the names.
        offsets: The position of each slot in its file.
        marks: The marks, all of the same size, at most 256 bytes.
        last_offset: The position of the second mark in a slot.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.
    """
    _require_places(files, numbers, offsets)
    _require_marks(offsets, marks, MARK_MOST_NBYTES)
    check = partial(_check, last_offset)
    with _opened(files, numbers, deadline_s) as fds:
        return [
            verdict_by(deadline_s, partial(check, *slot))
            for slot in zip(fds, offsets, marks, strict=True)
        ]


def read_slots(
    files: Files,
    numbers: Sequence[int],
    offsets: Sequence[int],
    pages: Sequence[Pieces],
    marks: Sequence[bytes],
    shape: tuple[int, int, int],
    alignment: int,
    run_nbytes: int,
    alone: bytes,
    skip: int,
    deadline_s: float,
    states: Sequence[bytearray] = (),
    move: Move | None = None,
) -> tuple[list[int], list[int]]:
    """Read the page of each slot, and verify it by its marks.

    Args:
        files: The files, as in `check_slots`.
        numbers: The file of each slot, as in `check_slots`.
        offsets: The position of each slot in its file. Adjacent slots are moved in one call.
        pages: The memory of each page. Its content is undefined unless the verdict is HIT.
        marks: The mark of each page, all of the same size.
        shape: The sizes of lead, page and tail.
        alignment: Each address and size of a page must be a multiple of this, and so must `run_nbytes`.
            Other pages are not tried, and their verdict is -EINVAL. With `states` only sizes count.
        run_nbytes: The size up to which adjacent slots are moved in one call. A larger page is moved in
            parts.
        alone: errno numbers, one byte each. After such an error, the slots of the failed call are moved
            one by one.
        skip: How many leading bytes the digest of a page leaves out. Negative: no digests.
        deadline_s: The time of `time.monotonic` after which the remaining verdicts are LATE.
        states: One state for each page, empty for a page that is not revocable. Without any states, no
            page is revocable.
        move: A replacement for os.preadv. The compiled function does not have this argument.

    Returns:
        The verdicts, and the xxh3-64 of each page that is a HIT (0 for the others). A verdict is HIT,
        WRONG if the marks are different or the file ends too early, REVOKED if the memory was revoked
        before the page was complete, LATE, or a negated errno.
    """
    _require_places(files, numbers, offsets)
    batch = _Batch(
        offsets, pages, marks, shape, alignment, run_nbytes, alone, deadline_s, states, skip
    )
    with _opened(files, numbers, deadline_s) as fds:
        verdicts = batch.run(fds, move or os.preadv, writing=False)
    return verdicts, [
        batch.digests.get(slot, 0) if verdict == HIT else 0 for slot, verdict in enumerate(verdicts)
    ]


def write_slots(
    files: Files,
    numbers: Sequence[int],
    offsets: Sequence[int],
    pages: Sequence[Pieces],
    marks: Sequence[bytes],
    shape: tuple[int, int, int],
    alignment: int,
    run_nbytes: int,
    alone: bytes,
    deadline_s: float,
    states: Sequence[bytearray] = (),
    move: Move | None = None,
) -> list[int]:
    """Write the page of each slot between its marks, from front to back.

    See `read_slots` for the arguments. A verdict is HIT, LATE, a negated errno after which part of the
    slot may be written, MISS if the file accepts no more bytes, or REVOKED, after which the slot has no
    second mark.
    """
    _require_places(files, numbers, offsets)
    batch = _Batch(offsets, pages, marks, shape, alignment, run_nbytes, alone, deadline_s, states)
    with _opened(files, numbers, deadline_s) as fds:
        return batch.run(fds, move or os.pwritev, writing=True)


@dataclass(frozen=True, slots=True)
class _Batch:
    offsets: Sequence[int]
    pages: Sequence[Pieces]
    marks: Sequence[bytes]
    shape: tuple[int, int, int]
    alignment: int
    run_nbytes: int
    alone: bytes
    deadline_s: float
    states: Sequence[bytearray]
    skip: int = -1
    digests: dict[int, int] = field(default_factory=dict[int, int])
    """The digests of the slots that were read, by slot."""

    def __post_init__(self) -> None:
        lead, nbytes, tail = self.shape
        require(lead > 0 and nbytes >= 0 and tail > 0)
        _require_marks(self.offsets, self.marks, min(lead, tail, MARK_MOST_NBYTES))
        require(len(self.pages) == len(self.marks))
        require(self.alignment > 0 and self.run_nbytes > 0)
        require(not self.run_nbytes % self.alignment)
        require(all(nbytes_of(page) == nbytes for page in self.pages))
        states_of(self.states, len(self.pages))

    def run(self, fds: Sequence[int], move: Move, *, writing: bool) -> list[int]:
        """Move all slots, and return the verdicts."""
        if time.monotonic() > self.deadline_s:
            return [LATE] * len(self.marks)
        verdicts: list[int] = []
        for run in self._runs(fds):
            if not self._is_aligned(run.start):
                verdicts.append(-errno.EINVAL)
            elif self._is_revoked(run.start):
                verdicts += [REVOKED] * len(run)
            else:
                verdicts += self._move_run(fds[run.start], move, run, writing=writing)
        return verdicts

    def _runs(self, fds: Sequence[int]) -> Iterator[range]:
        """Yield runs of slots that are adjacent and fit in one call.

        A page that is not aligned is a run of its own, and so is a revoked page.
        """
        most = max(1, min(_SLOTS_A_RUN, self.run_nbytes // sum(self.shape)))
        start = pieces = 0
        for slot in range(len(self.marks)):
            size = len(self.pages[slot]) + 2
            if slot > start and (
                slot - start == most
                or pieces + size > IOV_MAX
                or fds[slot] != fds[start]
                or self.offsets[slot] != self.offsets[slot - 1] + sum(self.shape)
                or not (self._is_aligned(start) and self._is_aligned(slot))
                or self._is_revoked(start)
                or self._is_revoked(slot)
            ):
                yield range(start, slot)
                start, pieces = slot, 0
            pieces += size
        if self.marks:
            yield range(start, len(self.marks))

    def _move_run(self, fd: int, move: Move, run: range, *, writing: bool) -> list[int]:
        if time.monotonic() > self.deadline_s:
            return [LATE] * len(run)
        if fd < 0:
            return [fd] * len(run)
        together = self._move_by_scratch if self.states else self._move_together
        try:
            return together(fd, move, run, writing=writing)
        except OSError as error:
            number = error.errno or errno.EIO
        if len(run) > 1 and number in self.alone:
            each = (
                self._move_run(fd, move, range(slot, slot + 1), writing=writing) for slot in run
            )
            return [verdict for (verdict,) in each]
        return [-number] * len(run)

    def _move_together(self, fd: int, move: Move, run: range, *, writing: bool) -> list[int]:
        lead, _, tail = self.shape
        # Do not close the mapping, because a traceback may keep views of it.
        memory = memoryview(mmap.mmap(-1, len(run) * (lead + tail)))
        margins: list[tuple[memoryview, memoryview]] = []
        pieces: list[Any] = []
        for slot in run:
            margin, memory = memory[: lead + tail], memory[lead + tail :]
            margins.append((margin[:lead], margin[lead:]))
            if writing:
                for part in margins[-1]:
                    part[: len(self.marks[slot])] = self.marks[slot]
            pieces += [margins[-1][0], *self.pages[slot], margins[-1][1]]
        nbytes = len(run) * sum(self.shape)
        done = move_all(move, fd, pieces, nbytes, self.offsets[run.start])
        whole = run[: done // sum(self.shape)]
        if writing:
            return [HIT] * len(whole) + [MISS] * (len(run) - len(whole))
        for slot in whole if self.skip >= 0 else ():
            self.digests[slot] = digest_of(self.pages[slot], self.skip)
        found = zip((self.marks[slot] for slot in whole), margins, strict=False)
        return [*starmap(_verdict_of, found), *[WRONG] * (len(run) - len(whole))]

    def _move_by_scratch(self, fd: int, move: Move, run: range, *, writing: bool) -> list[int]:
        """Move a run through separate memory, because its pages may be revoked."""
        size = sum(self.shape)
        # The mapping is aligned. Do not close it, because a traceback may keep views of it.
        scratch = memoryview(mmap.mmap(-1, len(run) * size))
        slots = [scratch[start : start + size] for start in range(0, scratch.nbytes, size)]
        verdicts = [HIT] * len(run)
        if writing:
            verdicts = [self._fill(slot, memory) for slot, memory in zip(run, slots, strict=True)]
        done = move_all(move, fd, [scratch], scratch.nbytes, self.offsets[run.start])
        whole = done // size
        if writing:
            rest = (MISS if verdict == HIT else verdict for verdict in verdicts[whole:])
            return [*verdicts[:whole], *rest]
        found = zip(run, slots[:whole], strict=False)
        return [*starmap(self._take, found), *[WRONG] * (len(run) - whole)]

    def _fill(self, slot: int, memory: memoryview) -> int:
        """Copy a page and its marks to the memory of its slot. A revoked page gets no second mark."""
        lead, nbytes, _ = self.shape
        mark, page = self.marks[slot], memory[lead : lead + nbytes]
        memory[: len(mark)] = mark
        try:
            copy_page(self._state(slot), self.pages[slot], page, writing=True)
        except RevokedError:
            page[:] = bytes(nbytes)
            return REVOKED
        memory[lead + nbytes : lead + nbytes + len(mark)] = mark
        return HIT

    def _take(self, slot: int, memory: memoryview) -> int:
        """Copy a page from the memory of its slot. Return the verdict for it."""
        lead, nbytes, _ = self.shape
        page = memory[lead : lead + nbytes]
        try:
            copy_page(self._state(slot), self.pages[slot], page, writing=False)
        except RevokedError:
            return REVOKED
        if self.skip >= 0:
            self.digests[slot] = digest_of([page], self.skip)
        return _verdict_of(self.marks[slot], (memory[:lead], memory[lead + nbytes :]))

    def _state(self, slot: int) -> bytearray:
        return self.states[slot] if self.states else bytearray()

    def _is_revoked(self, slot: int) -> bool:
        return is_revoked(self._state(slot))

    def _is_aligned(self, slot: int) -> bool:
        if self.states:
            return not self.shape[1] % self.alignment
        if self.alignment == 1:
            return True
        views = [memoryview(piece).cast("B") for piece in self.pages[slot]]
        return not any(
            address_of(view) % self.alignment or view.nbytes % self.alignment
            for view in views
            if view.nbytes
        )


def _verdict_of(mark: bytes, margins: tuple[memoryview, memoryview]) -> int:
    return HIT if all(bytes(part[: len(mark)]) == mark for part in margins) else WRONG


def _check(last_offset: int, fd: int, offset: int, mark: bytes) -> int:
    if fd < 0:
        return fd
    for place in (offset, offset + last_offset):
        if os.pread(fd, len(mark), place) != mark:
            return WRONG
    return HIT


@contextmanager
def _opened(
    files: Files, numbers: Sequence[int], deadline_s: float
) -> Generator[list[int], None, None]:
    """Yield the descriptor of each slot's file, or a negated errno. Opens nothing after the deadline."""
    if time.monotonic() > deadline_s:
        yield [-errno.ETIME] * len(numbers)  # not used, because every verdict is LATE
        return
    fds = list[int]()
    try:
        fds += _open_all(*files)
        yield [fds[number] for number in numbers]
    finally:
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _open_all(directory: str, names: Sequence[bytes], flags: int) -> list[int]:
    place = _open_at(None, os.fsencode(directory), _DIRECTORY) if names else -1
    if place < 0:
        return [place] * len(names)
    try:
        return [_open_at(place, name, flags) for name in names]
    finally:
        os.close(place)


def _open_at(directory: int | None, name: bytes, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=directory)
    except OSError as error:
        return -(error.errno or errno.EIO)


def _require_places(files: Files, numbers: Sequence[int], offsets: Sequence[int]) -> None:
    _, names, _ = files
    require(all(name and 0 not in name for name in names))
    require(len(numbers) == len(offsets))
    require(all(0 <= number < len(names) for number in numbers))


def _require_marks(offsets: Sequence[int], marks: Sequence[bytes], most_nbytes: int) -> None:
    require(len(offsets) == len(marks))
    require(all(0 < len(mark) == len(marks[0]) <= most_nbytes for mark in marks))
