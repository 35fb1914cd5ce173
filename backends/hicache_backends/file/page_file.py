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

A file may be overwritten in place while a reader holds it open (`recycle`). The writer makes the trailer
invalid first and writes the new one last. The reader compares the trailer before and after the page.
Equal trailers prove that nothing was written in between: no write uses a nonce twice.
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

from hicache_storage.backend_support.filesystem import refuse_link
from hicache_storage.backend_support.vectored_io import (
    DIRECT,
    DIRECT_ALIGNMENT,
    is_aligned,
    move_all,
    takes_direct_writes,
)

if TYPE_CHECKING:
    from hicache_backends.file.layout import Layout
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

TRAILER_NBYTES = 64
NONCE_NBYTES = 15

# Below it O_DIRECT is no quicker than buffered writes and a sync (docs/backends/file.md has figures).
_DIRECT_LEAST_NBYTES = 2 << 20

_PREFIX = struct.Struct("<4sHH16s")
_MAGIC = b"HiPg"
_VERSION = 1
_HEAD_NBYTES = 40
_BODY_NBYTES = 56
_INVALID_TRAILER = bytes(TRAILER_NBYTES)

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REWRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class ReadResult(enum.Enum):
    """The state of the file under a page's name."""

    HIT = enum.auto()
    """The whole page. From `check`: the page was synced before it was published."""
    UNSYNCED = enum.auto()
    """From `check` only: the page, which may not survive a loss of power."""
    MISS = enum.auto()
    """No file, or a file that changed under the reader."""
    WRONG = enum.auto()
    """A file that is not this page: it has another size, or another trailer."""


class PageFiles:
    """The page files of one key space: names, reads and writes, no policy. Thread-safe.

    Every method raises OSError. A missing file is a MISS.
    """

    def __init__(self, layout: Layout, space: KeySpace) -> None:
        self.space = space
        self.directory = layout.space_dir(space.id)
        self.nbytes = space.stored_nbytes
        self.file_nbytes = self.nbytes + TRAILER_NBYTES
        self._prefix = _PREFIX.pack(_MAGIC, _VERSION, 0, bytes.fromhex(space.id))
        self._checked_shards: set[str] = set()

    def path(self, page_hash: str) -> str:
        """Return the path of the page's file, whether the file is there or not.

        Raises:
            OSError: ELOOP when its directory is a symbolic link: no listing would find a page behind it.
        """
        shard = page_hash[:2]
        if shard not in self._checked_shards:
            self._check_shard(shard)
        return f"{self.directory}/{shard}/{page_hash}"

    def trailer(self, page_hash: str, nonce: bytes, *, synced: bool) -> bytes:
        """Return the trailer for one write of a page."""
        head = self._prefix + xxhash.xxh3_128_digest(page_hash.encode())
        body = head + (b"\1" if synced else b"\0") + nonce
        return body + xxhash.xxh3_64_digest(body)

    def exists(self, page_hash: str) -> bool:
        """Return True when a file of the right name and size is there.

        Raises:
            OSError: The file system does not answer.
        """
        try:
            status = os.stat(self.path(page_hash), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return status.st_size == self.file_nbytes and stat.S_ISREG(status.st_mode)

    def read(
        self, page_hash: str, page: Page, touched_ns: int | None, interval_s: float = 0.0
    ) -> ReadResult:
        """Read a page. A hit is touched, unless it was touched within `interval_s`."""
        try:
            fd = os.open(self.path(page_hash), _READ)
        except FileNotFoundError:
            return ReadResult.MISS
        try:
            before = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if not self._names(before, page_hash):
                return ReadResult.WRONG
            after = bytearray(TRAILER_NBYTES)
            done = move_all(os.preadv, fd, [*page.segments, after], self.file_nbytes)
            if done != self.file_nbytes or bytes(after) != before:
                return ReadResult.MISS
            if touched_ns is not None:
                touch(fd, touched_ns, interval_s)
            return ReadResult.HIT
        finally:
            os.close(fd)

    def check(self, path: str, page_hash: str, touched_ns: int | None = None) -> ReadResult:
        """Read the trailer of the file at `path`, without the page."""
        try:
            fd = os.open(path, _READ)
        except FileNotFoundError:
            return ReadResult.MISS
        try:
            trailer = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if not self._names(trailer, page_hash):
                return ReadResult.WRONG
            if touched_ns is not None:
                touch(fd, touched_ns)
            return ReadResult.HIT if trailer[_HEAD_NBYTES] else ReadResult.UNSYNCED
        finally:
            os.close(fd)

    def create(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            move_all(os.pwritev, fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)

    def create_synced(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file, and sync its bytes to the disk."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            if not self._write_direct(path, page, trailer):
                move_all(os.pwritev, fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def recycle(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> bool:
        """Write a page over another one; return False, with nothing changed, when that is not safe.

        The caller makes sure that no name outside the key space is linked to the file. A synced page is
        not overwritten: its old name may still be on the disk, and after a loss of power half of the new
        page would be found there.
        """
        fd = os.open(path, _REWRITE)
        try:
            old = os.pread(fd, TRAILER_NBYTES + 1, self.nbytes)
            if len(old) != TRAILER_NBYTES or old[_HEAD_NBYTES]:
                return False
            os.pwrite(fd, _INVALID_TRAILER, self.nbytes)
            move_all(os.pwritev, fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
            return True
        finally:
            os.close(fd)

    def _check_shard(self, shard: str) -> None:
        """Refuse a directory that is a symbolic link. A right directory is checked once."""
        with suppress(FileNotFoundError, NotADirectoryError):
            refuse_link(self.directory)
            refuse_link(f"{self.directory}/{shard}")
            self._checked_shards.add(shard)

    def _names(self, trailer: bytes, page_hash: str) -> bool:
        """Return True when `trailer` is a valid trailer of the page."""
        return (
            len(trailer) == TRAILER_NBYTES
            and trailer.startswith(self._prefix + xxhash.xxh3_128_digest(page_hash.encode()))
            and trailer.endswith(xxhash.xxh3_64_digest(trailer[:_BODY_NBYTES]))
        )

    def _write_direct(self, path: str, page: Page, trailer: bytes) -> bool:
        """Write around the page cache; return False when size, address or file system forbid it."""
        if self.nbytes < _DIRECT_LEAST_NBYTES or not is_aligned(page):
            return False
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | DIRECT)
        except OSError:
            return False
        try:
            block = mmap.mmap(-1, DIRECT_ALIGNMENT)  # not closed: a traceback may keep views of it
            block.write(trailer)
            buffers = [*page.segments, memoryview(block)]
            move_all(os.pwritev, fd, buffers, self.nbytes + DIRECT_ALIGNMENT)
            os.ftruncate(fd, self.file_nbytes)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(fd)
        return True


def touch(fd: int, modified_ns: int, interval_s: float = 0.0) -> None:
    """Set the modification time, which is a page's recency, where it can be set.

    The time of another user's file, or of a file on a full or read-only file system, stays as it is. The
    page was read all the same, and is no miss.
    """
    with suppress(OSError):
        if interval_s and modified_ns - os.fstat(fd).st_mtime_ns < interval_s * 1e9:
            return
        os.utime(fd, ns=(modified_ns, modified_ns))


def takes_direct_files(path: str) -> bool:
    """Return True when the file system takes O_DIRECT. A new file is made at `path` for a moment."""
    try:
        fd = os.open(path, _CREATE | DIRECT, 0o666)
    except OSError:
        return False
    try:
        return takes_direct_writes(fd)
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)
