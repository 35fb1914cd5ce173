"""Finds, reads and damages stored pages without the store.

`at_rest` uses the author's back doors. Without them it searches the files under the test's
directory for the bytes of the page, which works for every store that keeps them unchanged.
"""

from __future__ import annotations

import abc
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.tools.observation.files import regular_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicache_conformance.run.subject import Subject
    from hicache_storage.keys import KeySpace

_RUN_NBYTES = 64
"""A run of this many page bytes does not occur elsewhere by chance."""
_OVERHEAD_NBYTES = 4096
"""A page's own file may hold at most this many bytes more: header, trailer, padding."""
_SEARCHED_NBYTES = 1 << 30
_PLACES = 8


class PageAtRest(abc.ABC):
    """One stored page, as it lies in the store."""

    nbytes: int
    """The length of the page, without the bytes that the store adds."""

    @abc.abstractmethod
    def flip(self, offset: int, bit: int) -> None:
        """Flip one bit of the page's byte `offset`."""


class OwnObject(PageAtRest):
    """A page in an object of its own, which may be cut, extended and removed."""

    def __init__(
        self, read: Callable[[], bytes], write: Callable[[bytes | None], None], data: bytes
    ) -> None:
        self._read = read
        self.write = write
        """A function that replaces the object, or removes it if given None."""
        self.nbytes = len(data)
        self._start = max(0, read().find(data))

    def read(self) -> bytes:
        """Return the whole object: the page and the bytes that the store adds."""
        return self._read()

    def flip(self, offset: int, bit: int) -> None:
        self.flip_raw(self._start + offset, bit)

    def flip_raw(self, offset: int, bit: int) -> None:
        """Flip one bit of the object's byte `offset`."""
        raw = bytearray(self._read())
        raw[offset] ^= 1 << bit
        self.write(bytes(raw))

    def overhead_offsets(self) -> list[int]:
        """Return the offsets of the bytes that the store adds around the page."""
        size = len(self._read())
        return [*range(self._start), *range(self._start + self.nbytes, size)]


class InSharedFiles(PageAtRest):
    """A page that shares its files with other pages. Only its bits may be changed."""

    def __init__(self, root: Path, data: bytes) -> None:
        self._root = root
        self._data = data
        self.nbytes = len(data)

    def flip(self, offset: int, bit: int) -> None:
        low = max(0, min(offset - _RUN_NBYTES // 2, len(self._data) - _RUN_NBYTES))
        run = self._data[low : low + _RUN_NBYTES]
        if not _is_distinctive(run):
            low, run = 0, self._data[: offset + 1]
        for path in regular_files(self._root):
            for position in _positions(path, run):
                _flip_in_place(path, position + offset - low, bit)


def at_rest(
    subject: Subject,
    root: Path,
    space: KeySpace,
    pages: Mapping[str, bytes],
    page_hash: str,
) -> PageAtRest:
    """Find one of `pages`, which were set one after the other.

    Raises:
        NotVerified: The page can't be found.
    """
    data = pages[page_hash]
    others = [other for name, other in pages.items() if name != page_hash]
    if subject.offers("tamper"):
        return OwnObject(
            lambda: (subject.peek(space, page_hash) if subject.offers("peek") else None) or data,
            lambda changed: subject.tamper(space, page_hash, changed),
            data,
        )
    holders = [path for path in regular_files(root) if _holds(path, data)]
    if not holders:
        raise NotVerified(
            "the page's bytes are in no file under the test's directory: give the back door `tamper`"
        )
    if len(holders) == 1 and _is_its_own(holders[0], data, others):
        path = holders[0]
        return OwnObject(path.read_bytes, lambda changed: _replace(path, changed), data)
    return InSharedFiles(root, data)


def _is_its_own(path: Path, data: bytes, others: Sequence[bytes]) -> bool:
    if path.stat().st_size > len(data) + _OVERHEAD_NBYTES:
        return False
    raw = path.read_bytes()
    return data in raw and not any(
        run in raw for other in others for run in _distinctive_runs(other, 1)
    )


def _holds(path: Path, data: bytes) -> bool:
    """Return whether a file holds the page, in one piece or in several."""
    return any(True for run in _distinctive_runs(data, _PLACES) for _ in _positions(path, run))


def _distinctive_runs(data: bytes, most: int) -> list[bytes]:
    """Return runs of bytes, from places all over a page, that no other page has."""
    step = max(1, (len(data) - _RUN_NBYTES) // _PLACES)
    runs = (data[low : low + _RUN_NBYTES] for low in range(0, len(data), step))
    return [run for run in runs if _is_distinctive(run)][:most]


def _is_distinctive(run: bytes) -> bool:
    """Return whether these bytes belong to one page only: padding and zeros do not."""
    return len(set(run)) > min(len(run) // 3, _PLACES)


def _positions(path: Path, run: bytes) -> Iterator[int]:
    try:
        with path.open("rb") as file:
            if not 0 < os.fstat(file.fileno()).st_size <= _SEARCHED_NBYTES:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                found = view.find(run)
                while found >= 0:
                    yield found
                    found = view.find(run, found + 1)
    except OSError:
        return  # The file has gone since it was listed, or may not be read.


def _flip_in_place(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        fd = file.fileno()
        (value,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([value ^ 1 << bit]), offset)


def _replace(path: Path, data: bytes | None) -> None:
    """Replace this file with a new one, so that no process that maps the old one is killed by SIGBUS."""
    if data is None:
        path.unlink()
        return
    fd, aside = tempfile.mkstemp(dir=path.parent.parent)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    Path(aside).chmod(path.stat().st_mode)
    Path(aside).replace(path)
