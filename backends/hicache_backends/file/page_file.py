"""One page in one file: the bytes of the page, then a trailer that proves them.

    offset  bytes  field of the trailer
    0       4      magic "HiPg"
    4       2      format version
    6       2      zeros
    8       16     key-space id
    24      16     xxh3-128 of the page hash
    40      1      1: synced to disk before it was published
    41      15     nonce, new with every write
    56      8      xxh3-64 of the 56 bytes before

A file may be overwritten in place while a reader holds it open (`recycle`). The writer first makes the
trailer invalid, and writes the new one last. The reader compares the trailer before and after it reads
the page. If both are equal, nothing was written in between, because no two writes use the same nonce.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from typing import TYPE_CHECKING

from hicache_storage import native
from hicache_storage.backend_support.revocable import states_of
from hicache_storage.backend_support.vectored_io import (
    DIRECT,
    DIRECT_ALIGNMENT,
    is_aligned,
    move_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_backends.file.layout import Layout
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

TRAILER_NBYTES = 64

# For smaller pages O_DIRECT is no faster than buffered writes and a sync (docs/backends/file.md has
# figures).
_DIRECT_LEAST_NBYTES = 2 << 20

_PREFIX = struct.Struct("<4sHH16s")
_MAGIC = b"HiPg"
_VERSION = 1
_HEAD_NBYTES = 40
_INVALID_TRAILER = bytes(TRAILER_NBYTES)

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_REWRITE = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class PageFiles:
    """The page files of one key space: names, reads and writes, but no policy. Thread-safe.

    Batches return the verdicts of `hicache_storage.native`; a negative verdict is an errno. The
    other methods may raise OSError.
    """

    def __init__(self, layout: Layout, space: KeySpace) -> None:
        self.space = space
        self.directory = layout.space_dir(space.id)
        self.nbytes = space.stored_nbytes
        self.file_nbytes = self.nbytes + TRAILER_NBYTES
        self._directory = os.fsencode(self.directory)
        self._prefix = _PREFIX.pack(_MAGIC, _VERSION, 0, bytes.fromhex(space.id))
        self._checked_shards: set[str] = set()
        self.next_look_s = 0.0
        """The `time.monotonic` time of the next look for the manifest."""

    def path(self, page_hash: str) -> str:
        """Return the path of the page's file, whether or not the file exists.

        Raises:
            OSError: ELOOP if its directory is a symbolic link, because listings do not follow
                links.
        """
        code = self.unusable([page_hash]).get(page_hash[:2])
        if code:
            raise OSError(code, os.strerror(code), f"{self.directory}/{page_hash[:2]}")
        return f"{self.directory}/{page_hash[:2]}/{page_hash}"

    def unusable(self, hashes: Sequence[str]) -> dict[str, int]:
        """Find the directories of these pages that are symbolic links, or cannot be read.

        Return their errors by directory name. A directory that was found usable is not checked
        again.
        """
        shards = sorted({page_hash[:2] for page_hash in hashes} - self._checked_shards)
        if not shards:
            return {}
        paths = [self._directory, *(b"%b/%b" % (self._directory, one.encode()) for one in shards)]
        own, *modes = native.modes_of(paths)
        codes = {
            shard: _error_of(own) or _error_of(mode)
            for shard, mode in zip(shards, modes, strict=True)
        }
        self._checked_shards.update(
            shard for shard, mode in zip(shards, modes, strict=True) if mode and not codes[shard]
        )
        return {shard: code for shard, code in codes.items() if code}

    def exists(self, hashes: Sequence[str], deadline: Deadline) -> list[int]:
        """Return HIT for each page that has a file of the right name and size."""
        if broken := self.unusable(hashes):
            return _around(broken, hashes, lambda usable, _: self.exists(usable, deadline))
        return native.exists_files(self.files(hashes)[0], self.file_nbytes, deadline.end_s)

    def read(
        self,
        hashes: Sequence[str],
        pages: Sequence[Page],
        touched_ns: int | None,
        interval_s: float,
        deadline: Deadline,
    ) -> list[int]:
        """Read pages. Return the verdict of the data plane on each. Touch each hit.

        A page that was touched within `interval_s` is not touched again. The first page of a batch
        gets the newest time. Compute the digest of each page that needs one.
        """
        if broken := self.unusable(hashes):

            def read_usable(usable: Sequence[str], indices: Sequence[int]) -> list[int]:
                wanted = [pages[index] for index in indices]
                return self.read(usable, wanted, touched_ns, interval_s, deadline)

            return _around(broken, hashes, read_usable)
        skip = pages[0].digest_skip if pages else None
        verdicts, digests = native.read_files(
            *self.files(hashes),
            [page.segments for page in pages],
            self.nbytes,
            -1 if touched_ns is None else touched_ns,
            int(interval_s * 1e9),
            -1 if skip is None else skip,
            deadline.end_s,
            states_of(pages),
        )
        if skip is not None:
            for page, verdict, digest in zip(pages, verdicts, digests, strict=True):
                if verdict == native.HIT:
                    page.digest = digest
        return verdicts

    def stat(
        self, hashes: Sequence[str], deadline: Deadline
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the verdict on each page's file, and the modification time and size of each HIT."""
        found: dict[str, tuple[int, int]] = {}

        def stat_pages(part: Sequence[str], _: Sequence[int]) -> list[int]:
            verdicts, modified_ns, sizes = native.stat_files(self.files(part)[0], deadline.end_s)
            found.update(zip(part, zip(modified_ns, sizes, strict=True), strict=True))
            return verdicts

        verdicts = _around(self.unusable(hashes), hashes, stat_pages)
        each = [found.get(page_hash, (0, 0)) for page_hash in hashes]
        return verdicts, [modified_ns for modified_ns, _ in each], [size for _, size in each]

    def check(self, hashes: Sequence[str], touched_ns: int | None, deadline: Deadline) -> list[int]:
        """Read the trailers of pages. Return HIT, UNSYNCED, MISS or WRONG for each."""
        if broken := self.unusable(hashes):
            return _around(broken, hashes, lambda part, _: self.check(part, touched_ns, deadline))
        ns = -1 if touched_ns is None else touched_ns
        return native.check_files(*self.files(hashes), self.nbytes, ns, deadline.end_s)

    def check_aside(self, page_hash: str, path: str, deadline: Deadline) -> int:
        """Return the verdict of `check` on a page whose file was moved to `path`."""
        _, names = self.files([page_hash])
        (verdict,) = native.check_files([os.fsencode(path)], names, self.nbytes, -1, deadline.end_s)
        return verdict

    def files(self, hashes: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the path of each page's file, and the name that its trailer contains."""
        return native.page_files(self._directory, self._prefix, hashes)

    def create(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            move_all(os.pwritev, fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
        finally:
            os.close(fd)

    def create_synced(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> None:
        """Write a page to a new file, and sync its bytes to disk."""
        fd = os.open(path, _CREATE, 0o666)
        try:
            if not self._write_direct(path, page, trailer):
                move_all(os.pwritev, fd, [*page.segments, trailer], self.file_nbytes)
            os.utime(fd, ns=(modified_ns, modified_ns))
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def recycle(self, path: str, page: Page, trailer: bytes, modified_ns: int) -> bool:
        """Overwrite the file of another page. If that is not safe, change nothing and return False.

        The caller makes sure that no name outside the key space is linked to the file. A synced
        page is not overwritten: its old name may still be on disk, and after a power loss that name
        would show half of the new page.
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

    def has_shard(self, path: str) -> bool:
        """Return True if a directory of pages existed when it was last looked at."""
        return os.path.basename(path) in self._checked_shards

    def _write_direct(self, path: str, page: Page, trailer: bytes) -> bool:
        """Write a file around the page cache.

        Return False if the size, the address or the file system forbids it.
        """
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


def _around(
    broken: Mapping[str, int],
    hashes: Sequence[str],
    call: Callable[[Sequence[str], Sequence[int]], list[int]],
) -> list[int]:
    """Call `call` for the pages in usable directories. Return the verdicts of all pages."""
    verdicts = [-broken.get(page_hash[:2], 0) for page_hash in hashes]
    indices = [index for index, verdict in enumerate(verdicts) if not verdict]
    found = call([hashes[index] for index in indices], indices)
    for index, verdict in zip(indices, found, strict=True):
        verdicts[index] = verdict
    return verdicts


def _error_of(mode: int) -> int:
    """Return the errno for a mode of `native.modes_of`: ELOOP for a link, 0 for other files."""
    return -mode if mode < 0 else errno.ELOOP * stat.S_ISLNK(mode)
