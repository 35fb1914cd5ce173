"""Open, extend and deallocate the files with one key space's slots, and read the slots' marks."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.layout import MARK_NBYTES, Place
from hicache_storage import native
from hicache_storage.backend_support.vectored_io import DIRECT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs.layout import Geometry, Layout, MarkedPage
    from hicache_storage.backend_support.deadline import Deadline

_FILE_NAME = re.compile(r"slots-([0-9]{4,})")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_LEAST_STEP_NBYTES = 1 << 20
_MOST_STEP_NBYTES = 256 << 20
_LEFT_FREE_NBYTES = 4 << 20
KEEP_SIZE = 1
_PUNCH_HOLE = 2
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})
_NO_MARK = bytes(MARK_NBYTES)


class SlotFiles:
    """The files of one key space. Immutable; every method may raise OSError."""

    __slots__ = ("_layout", "directory", "geometry")

    def __init__(self, layout: Layout, geometry: Geometry) -> None:
        self._layout = layout
        self.geometry = geometry
        self.directory = layout.space_dir(geometry.space.id)

    def path(self, number: int) -> str:
        """Return the path of the file with this number."""
        return f"{self.directory}/{_file_name(number)}"

    @contextmanager
    def opened(self, *, writing: bool) -> Generator[OpenFiles, None, None]:
        """Yield the files, open for the duration of one call."""
        files = OpenFiles(self, writing=writing)
        try:
            yield files
        finally:
            files.close()

    def grow(self, allocated: int, missing: int, most: int | None) -> int:
        """Add `missing` slots after the first `allocated`. Return how many slots there are afterwards.

        The number of slots is doubled, within bounds, but at most `most` slots are added. If the
        file system is full, there may be fewer.
        """
        slot_nbytes = self.geometry.slot_nbytes
        least = -(-_LEAST_STEP_NBYTES // slot_nbytes)
        step = max(least, min(allocated, _MOST_STEP_NBYTES // slot_nbytes), missing)
        for wanted in (step if most is None else max(missing, min(step, most)), missing):
            try:
                self._extend(allocated, allocated + wanted)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
            else:
                return allocated + wanted
        return allocated

    def check(self, places: Mapping[str, Place], deadline: Deadline) -> dict[str, int]:
        """Return for each page HIT if its slot has the right marks, else WRONG, LATE or -errno."""
        verdicts = native.check_slots(
            *self.arguments([place.slot for place in places.values()], writing=False),
            [self.geometry.mark(page_hash, place.stamp) for page_hash, place in places.items()],
            self.geometry.last_mark_offset,
            deadline.end_s,
        )
        return dict(zip(places, verdicts, strict=True))

    def arguments(
        self, slots: Sequence[int], *, writing: bool, direct: bool = False
    ) -> tuple[tuple[str, list[bytes], int], list[int], list[int]]:
        """Return the arguments for the data plane: the files, and each slot's file and offset."""
        positions = [self.geometry.position(slot) for slot in slots]
        names = sorted({number for number, _ in positions})
        index = {number: place for place, number in enumerate(names)}
        flags = (_WRITE if writing else _READ) | (DIRECT if direct else 0)
        return (
            (self.directory, [_file_name(number).encode() for number in names], flags),
            [index[number] for number, _ in positions],
            [offset for _, offset in positions],
        )

    def invalidate(self, slots: Sequence[int], until: Deadline | None = None) -> int:
        """Erase the first mark of each slot, so that a rebuilt index finds no page there.

        No slot is begun after `until`. Return how many slots were finished.
        """
        return self._each(slots, until, _invalidate)

    def deallocate(self, slots: Sequence[int], until: Deadline | None = None) -> int:
        """Invalidate slots, and return their blocks to the file system if it supports that.

        Slots that follow each other take one system call. No slot is begun after `until`. Return
        how many slots were finished.
        """
        done = 0
        with self.opened(writing=True) as files:
            for number, offset, count in self._runs(slots):
                fd = files.descriptor(number)
                if until is not None and until.passed():
                    return done
                self._punch(fd, offset, count)
                done += count
        return done

    def allocated(self) -> int:
        """Return the number of slots, computed from the sizes of the files."""
        numbers = self._numbers()
        if not numbers:
            return 0
        nbytes = os.stat(self.path(numbers[-1])).st_size
        whole = min(nbytes // self.geometry.slot_nbytes, self.geometry.slots_per_file)
        return numbers[-1] * self.geometry.slots_per_file + whole

    def newest(self, on_slot: Callable[[], None] = lambda: None) -> dict[str, Place]:
        """Find every whole page by its marks. Return the place of each page's latest write.

        `on_slot` is called before each slot is read, and may raise to stop.
        """
        newest: dict[str, Place] = {}
        for slot, found in self._whole_slots(on_slot):
            place = newest.get(found.page_hash)
            if place is None or place.stamp < found.stamp:
                newest[found.page_hash] = Place(slot, found.stamp)
        return newest

    def make_directory(self) -> None:
        """Make the key space's directory if it has vanished."""
        self._layout.make_space(self.geometry.space)

    def _each(
        self, slots: Sequence[int], until: Deadline | None, act: Callable[[int, int], None]
    ) -> int:
        with self.opened(writing=True) as files:
            for done, slot in enumerate(slots):
                number, offset = self.geometry.position(slot)
                fd = files.descriptor(number)
                if until is not None and until.passed():
                    return done
                act(fd, offset)
        return len(slots)

    def _runs(self, slots: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return the file, offset and length of each run of slots that follow each other in a file."""
        slot_nbytes = self.geometry.slot_nbytes
        runs: list[tuple[int, int, int]] = []
        for slot in slots:
            number, offset = self.geometry.position(slot)
            if runs:
                last_number, first, count = runs[-1]
                if (number, offset) == (last_number, first + count * slot_nbytes):
                    runs[-1] = number, first, count + 1
                    continue
            runs.append((number, offset, 1))
        return runs

    def _punch(self, fd: int, offset: int, count: int) -> None:
        """Deallocate a run of `count` slots."""
        slot_nbytes = self.geometry.slot_nbytes
        try:
            fallocate(fd, _PUNCH_HOLE | KEEP_SIZE, offset, count * slot_nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            for slot in range(count):
                _invalidate(fd, offset + slot * slot_nbytes)

    def _whole_slots(self, on_slot: Callable[[], None]) -> Iterator[tuple[int, MarkedPage]]:
        """Yield the slots with two equal marks, and the pages that the marks name."""
        with self.opened(writing=False) as files:
            for number in self._numbers():
                first = number * self.geometry.slots_per_file
                nbytes = os.stat(self.path(number)).st_size
                for slot in range(first, first + nbytes // self.geometry.slot_nbytes):
                    on_slot()
                    head, tail = self._marks(files, slot)
                    found = self.geometry.read_mark(head) if head == tail else None
                    if found is not None:
                        yield slot, found

    def _marks(self, files: OpenFiles, slot: int) -> tuple[bytes, bytes]:
        number, offset = self.geometry.position(slot)
        fd = files.descriptor(number)
        head = os.pread(fd, MARK_NBYTES, offset)
        if not head.strip(b"\0"):
            return head, b""
        return head, os.pread(fd, MARK_NBYTES, offset + self.geometry.last_mark_offset)

    def _extend(self, start: int, stop: int) -> None:
        """Make the slots from `start` to `stop`, one file after the other."""
        _require_free_space(self._layout.root, (stop - start) * self.geometry.slot_nbytes)
        with self.opened(writing=True) as files:
            while start < stop:
                number, offset = self.geometry.position(start)
                end = min(stop, (number + 1) * self.geometry.slots_per_file)
                nbytes = (end - start) * self.geometry.slot_nbytes
                _preallocate(files.descriptor(number), offset, nbytes)
                start = end

    def _numbers(self) -> list[int]:
        try:
            with os.scandir(self.directory) as entries:
                found = [_FILE_NAME.fullmatch(entry.name) for entry in entries]
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in found if match)


class OpenFiles:
    """The descriptors of one call, each opened on first use. Not thread-safe."""

    def __init__(self, files: SlotFiles, *, writing: bool) -> None:
        self._files = files
        self._writing = writing
        self._descriptors: dict[int, int] = {}
        self._directory_fd = -1

    def descriptor(self, number: int) -> int:
        """Return a descriptor of the file with this number."""
        if number not in self._descriptors:
            flags = _WRITE if self._writing else _READ
            self._descriptors[number] = self._open(_file_name(number), flags)
        return self._descriptors[number]

    def close(self) -> None:
        """Close all descriptors."""
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()
        self._close_directory()

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags, 0o666, dir_fd=self._directory())
        except FileNotFoundError:
            if not self._writing:
                raise
            self._files.make_directory()
            self._close_directory()
            return os.open(name, flags, 0o666, dir_fd=self._directory())

    def _directory(self) -> int:
        """Return a descriptor of the key space's directory. Refuse a link to another directory."""
        if self._directory_fd < 0:
            self._directory_fd = os.open(self._files.directory, _DIRECTORY)
        return self._directory_fd

    def _close_directory(self) -> None:
        fd, self._directory_fd = self._directory_fd, -1
        if fd >= 0:
            os.close(fd)


def _file_name(number: int) -> str:
    return f"slots-{number:04d}"


def _invalidate(fd: int, offset: int) -> None:
    os.pwrite(fd, _NO_MARK, offset)


def _require_free_space(root: str, nbytes: int) -> None:
    """Refuse new slots that leave no space for the index's log, which is needed to free slots."""
    status = os.statvfs(root)
    if status.f_bavail * status.f_frsize < nbytes + _LEFT_FREE_NBYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), root)


def _preallocate(fd: int, offset: int, nbytes: int) -> None:
    try:
        fallocate(fd, 0, offset, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        if os.fstat(fd).st_size < offset + nbytes:
            os.ftruncate(fd, offset + nbytes)


def fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    """Call fallocate(2), because posixfallocate writes to every block if fallocate is missing."""
    if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_libc = ctypes.CDLL(None, use_errno=True)
