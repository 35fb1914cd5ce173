"""The writing of one batch of pages, from the first check to the last sync."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_backends.file.page_file import ReadResult
from hicache_storage.backend_support.filesystem import sync_directory
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.capacity import Grant
    from hicache_backends.file.page_file import PageFiles
    from hicache_backends.file.process_state import ProcessState
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

logger = logging.getLogger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSALS = _FULL | {errno.EFBIG}
# No page can be written then: the file system is read-only, or its server or device is gone.
_WHOLE_STORE = frozenset({errno.EROFS, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO})


class BatchWriter:
    """Writes the pages of one batch that are not there yet. Used once, by one thread."""

    def __init__(
        self, process: ProcessState, files: PageFiles, *, synced: bool, deadline: Deadline
    ) -> None:
        self._process = process
        self._files = files
        self._synced = synced
        self._deadline = deadline
        # Within a batch the first page is the newest: of a prefix, the tail is evicted first.
        self._now_ns = time.time_ns()
        self._renews_recency = process.capacity.limits.evict
        self._refusal: int | None = None
        """The error number by which the file system refused a page."""
        self._replaced = self._recycled = 0
        self._unsynced_dirs: set[str] = set()

    def run(self, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store every page, and return for each whether it is there now."""
        stored: set[str] = set()
        absent: dict[str, Page] = {}
        for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            if self._deadline.passed():
                self._process.counters.add("timeouts", len(hashes) - index)
                break
            if page_hash in stored or page_hash in absent or page.nbytes != self._files.nbytes:
                continue
            if self._is_present(page_hash):
                stored.add(page_hash)
            else:
                absent[page_hash] = page
        if absent:
            stored.update(self._write(absent))
        if self._unsynced_dirs and not self._sync():
            for page_hash in absent:
                path = self._files.path(page_hash)
                self._process.capacity.remove(path, self._files.file_nbytes, self._deadline)
            stored.clear()
        return [page_hash in stored for page_hash in hashes]

    def _is_present(self, page_hash: str) -> bool:
        try:
            path = self._files.path(page_hash)
            touched_ns = self._now_ns if self._renews_recency else None
            found = self._files.check(path, page_hash, touched_ns)
            if found is ReadResult.WRONG:
                self._process.heal(self._files, page_hash, self._deadline)
        except OSError as error:
            self._note(error)
            return False
        if self._synced and found is ReadResult.UNSYNCED:
            self._replaced += 1
            return False
        if self._synced and found is ReadResult.HIT:  # its writer may not have synced the name yet
            self._unsynced_dirs.add(os.path.dirname(path))
        return found in (ReadResult.HIT, ReadResult.UNSYNCED)

    def _write(self, absent: dict[str, Page]) -> list[str]:
        capacity = self._process.capacity
        grant = capacity.reserve(len(absent), self._files.file_nbytes, self._deadline)
        written: list[str] = []
        todo = iter(absent.items())
        try:
            for tried, (page_hash, page) in enumerate(itertools.islice(todo, grant.pages)):
                if self._refusal is not None or self._process.closing:
                    break
                if self._deadline.passed():
                    self._process.counters.add("timeouts", grant.pages - tried)
                    break
                if self._store(page_hash, page, grant, self._now_ns - tried):
                    written.append(page_hash)
        finally:
            replaced = min(self._replaced, len(written))
            capacity.release_replaced(replaced * self._files.file_nbytes, self._deadline)
            capacity.settle(grant, len(written), self._deadline)
        self._process.counters.add("recycled", self._recycled)
        missed = grant.pages - len(written)
        if self._refusal is not None:
            self._process.counters.add("refused_no_space", missed)
        if self._refusal in _FULL:
            capacity.evict(missed * grant.page_nbytes, self._deadline)
        return written

    def _store(self, page_hash: str, page: Page, grant: Grant, modified_ns: int) -> bool:
        """Write one page to a temporary file and publish it. A failure leaves nothing behind."""
        nonce = self._process.writer.nonce()
        trailer = self._files.trailer(page_hash, nonce, synced=self._synced)
        recyclable = grant.recyclable.pop() if grant.recyclable else None
        try:
            try:
                self._attempt(page_hash, page, trailer, recyclable, modified_ns)
            except FileNotFoundError:
                self._process.restore_writer(self._deadline)
                self._attempt(page_hash, page, trailer, None, modified_ns)
        except OSError as error:
            if isinstance(error, StorageUnavailable) or error.errno in _WHOLE_STORE:
                raise
            self._note(error)
            return False
        return True

    def _attempt(
        self, page_hash: str, page: Page, trailer: bytes, recyclable: str | None, modified_ns: int
    ) -> None:
        path = recyclable or self._process.writer.temp_path()
        try:
            self._fill(path, page, trailer, modified_ns, recycled=recyclable is not None)
            self._publish(path, page_hash)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def _fill(
        self, path: str, page: Page, trailer: bytes, modified_ns: int, *, recycled: bool
    ) -> None:
        if recycled:
            with suppress(PermissionError):  # another user's file can be claimed, not written to
                if self._files.recycle(path, page, trailer, modified_ns):
                    self._recycled += 1
                    return
            os.unlink(path)
        create = self._files.create_synced if self._synced else self._files.create
        create(path, page, trailer, modified_ns)

    def _publish(self, path: str, page_hash: str) -> None:
        target = self._files.path(page_hash)
        try:
            os.rename(path, target)
        except FileNotFoundError:
            self._make_shard(os.path.dirname(target))
            os.rename(path, target)
        if self._synced:
            self._unsynced_dirs.add(os.path.dirname(target))

    def _make_shard(self, shard: str) -> None:
        """Make a directory of the key space, which its first page needs."""
        layout = self._process.layout
        with suppress(FileExistsError):
            try:
                os.mkdir(shard)
            except FileNotFoundError:
                layout.make_space(self._files.space, self._process.writer.temp_path())
                os.mkdir(shard)
        if self._synced:
            self._unsynced_dirs.update((self._files.directory, layout.spaces, layout.root))

    def _sync(self) -> bool:
        try:
            for directory in self._unsynced_dirs:
                sync_directory(directory)
        except OSError as error:
            self._note(error)
            return False
        return True

    def _note(self, error: OSError) -> None:
        if error.errno in _REFUSALS:
            self._refusal = error.errno
        else:
            self._process.counters.add("io_errors")
        logger.debug("a page was not written: %s", error)
