"""One page in one file: its bytes, then a trailer that proves them.

    offset  bytes  field of the trailer
    0       4      magic "HiPg"
    4       2      format version
    6       2      zeros
    8       16     key-space id
    24      16     xxh3-128 of the page hash
    40      1      1: synced to disk before it was published
    41      15     nonce, new with every write
    56      8      xxh3-64 of the 56 bytes before

A file may be overwritten in place while a reader holds it open (`recycle`). The writer spoils the
trailer first and writes the new one last; the reader wants the same trailer before and after the page.
Equal trailers mean that nothing happened in between: no write uses a nonce twice.
"""

from __future__ import annotations

import enum
import errno
import mmap
import os
import stat
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import xxhash

from hicache_backends.file.layout import refuse_link
from hicache_backends.file.vectors import read_into, write_from

if TYPE_CHECKING:
    from hicache_backends.file.layout import Layout
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

TRAILER_NBYTES = 64
NONCE_NBYTES = 15
DIRECT_ALIGNMENT = 4096

# Below it O_DIRECT is no quicker than buffered writes and a sync (docs/backends/file.md has figures).
_DIRECT_LEAST_NBYTES = 2 << 20

_PREFIX = struct.Struct("<4sHH16s")
_MAGIC = b"HiPg"
_VERSION = 1
_HEAD_NBYTES = 40
_BODY_NBYTES = 56
_SPOILED = bytes(TRAILER_NBYTES)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REWRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_DIRECT: int = getattr(os, "O_DIRECT", 0)


class Reading(enum.Enum):
    """What was found under a page's name."""

    HIT = enum.auto()
    """The page, whole. Of `check`: the page, and it was synced before it was published."""
    UNSYNCED = enum.auto()
    """Of `check` only: the page, with no promise that it survives a loss of power."""
    MISS = enum.auto()
    """Nothing, or a file that changed under the reader."""
    WRONG = enum.auto()
    """A file that is not this page: another size, or another trailer."""


class PageFiles:
    """The page files of one key space: names, reads and writes, no policy. Thread-safe.

    Everything raises OSError; a file that is missing is a MISS.
    """

    __slots__ = ("_own_fans", "_prefix", "directory", "file_nbytes", "nbytes", "space")

    def __init__(self, layout: Layout, space: KeySpace) -> None:
        self.space = space
        self.directory = layout.space_dir(space.id)
        self.nbytes = space.stored_nbytes
        self.file_nbytes = self.nbytes + TRAILER_NBYTES
        self._prefix = _PREFIX.pack(_MAGIC, _VERSION, 0, bytes.fromhex(space.id))
        self._own_fans: set[str] = set()

    def path(self, page_hash: str) -> str:
        """Where the page lies, if it is there.

        Raises:
            OSError: ELOOP, where its directory is a symlink: pages behind it would be listed by nobody.
        """
        fan = page_hash[:2]
        if fan not in self._own_fans:
            self._look_at(fan)
        return f"{self.directory}/{fan}/{page_hash}"

    def trailer(self, page_hash: str, nonce: bytes, *, synced: bool) -> bytes:
        """What goes behind the page's bytes."""
        head = self._prefix + xxhash.xxh3_128_digest(page_hash.encode())
        body = head + (b"\1" if synced else b"\0") + nonce
        return body + xxhash.xxh3_64_digest(body)

    def exists(self, page_hash: str) -> bool:
        """Whether a file of the right name and size is there.

        Raises:
            OSError: That cannot be told.
        """
        try:
            status = os.stat(self.path(page_hash), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return status.st_size == self.file_nbytes and stat.S_ISREG(status.st_mode)

    def read(
        self, page_hash: str, page: Page, touched_ns: int | None, interval_s: float = 0.0
    ) -> Reading:
        """Read a page. On a hit it is touched, unless that was done within `interval_s`."""
        try:
            fd = os.open(self.path(page_hash), _READ)
        except FileNotFoundError:
            return Reading.MISS
        try:
            before = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if not self._names(before, page_hash):
                return Reading.WRONG
            after = bytearray(TRAILER_NBYTES)
            done = read_into(fd, [*page.segments, after], self.file_nbytes)
            if done != self.file_nbytes or bytes(after) != before:
                return Reading.MISS
            if touched_ns is not None:
                touch(fd, touched_ns, interval_s)
            return Reading.HIT
        finally:
            os.close(fd)

    def check(self, path: str, page_hash: str, touched_ns: int | None = None) -> Reading:
        """Look at the trailer of the file at `path`, without the page."""
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            return Reading.MISS
        try:
            trailer = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if not self._names(trailer, page_hash):
                return Reading.WRONG
            if touched_ns is not None:
                touch(fd, touched_ns)
            return Reading.HIT if trailer[_HEAD_NBYTES] else Reading.UNSYNCED
        finally:
            os.close(fd)

    def create(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            write_from(fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)

    def create_synced(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file, and its bytes to the disk."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            if not self._write_direct(path, page, trailer):
                write_from(fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def recycle(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> bool:
        """Write a page over another; False, and nothing is changed, where the file may not be reused.

        The caller sees to it that no name outside the key space is linked to the file.
        A synced page is not reused: after a loss of power it could be found half overwritten under its
        old name, which the kernel may not have taken off the disk yet.
        """
        fd = os.open(path, _REWRITE)
        try:
            old = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if len(old) != TRAILER_NBYTES or old[_HEAD_NBYTES]:
                return False
            os.pwrite(fd, _SPOILED, self.nbytes)
            write_from(fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
            return True
        finally:
            os.close(fd)

    def _look_at(self, fan: str) -> None:
        """Refuse a directory that is a symlink; what is right is looked at once."""
        with suppress(FileNotFoundError, NotADirectoryError):
            refuse_link(self.directory)
            refuse_link(f"{self.directory}/{fan}")
            self._own_fans.add(fan)

    def _names(self, trailer: bytes, page_hash: str) -> bool:
        return (
            len(trailer) == TRAILER_NBYTES
            and trailer.startswith(self._prefix + xxhash.xxh3_128_digest(page_hash.encode()))
            and trailer.endswith(xxhash.xxh3_64_digest(trailer[:_BODY_NBYTES]))
        )

    def _write_direct(self, path: str, page: Page, trailer: bytes) -> bool:
        """Write around the page cache; False where size, address or file system forbid it."""
        if self.nbytes < _DIRECT_LEAST_NBYTES or not _is_aligned(page):
            return False
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError:
            return False
        try:
            block = mmap.mmap(-1, DIRECT_ALIGNMENT)  # not closed: a traceback may keep views of it
            block.write(trailer)
            write_from(fd, [*page.segments, memoryview(block)], self.nbytes + DIRECT_ALIGNMENT)
            os.ftruncate(fd, self.file_nbytes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(fd)
        return True


def touch(fd: int, modified_ns: int, interval_s: float = 0.0) -> None:
    """Set the modification time, which is a page's recency. Where it cannot be set it is left as it is.

    Another user's file, a file system that has become read-only, or a full one that copies what it
    writes: none of them makes a page that was read a miss.
    """
    with suppress(OSError):
        if interval_s and modified_ns - os.fstat(fd).st_mtime_ns < interval_s * 1e9:
            return
        os.utime(fd, ns=(modified_ns, modified_ns))


def takes_direct_writes(path: str) -> bool:
    """Whether the file system takes O_DIRECT. Makes a new file at `path`, for a moment."""
    try:
        fd = os.open(path, _CREATE | _DIRECT, 0o666)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, DIRECT_ALIGNMENT) as block:
            return bool(_DIRECT) and os.pwrite(fd, block, 0) == DIRECT_ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)


def _is_aligned(page: Page) -> bool:
    return bool(_DIRECT) and all(
        address % DIRECT_ALIGNMENT == 0 and nbytes % DIRECT_ALIGNMENT == 0
        for address, nbytes in page.addresses
    )
