"""One batch on its way to disk."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_backends.file.descriptors import sync_directory
from hicache_backends.file.page_file import Reading
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
        self, presence: ProcessState, files: PageFiles, *, synced: bool, deadline: Deadline
    ) -> None:
        self._presence = presence
        self._files = files
        self._synced = synced
        self._deadline = deadline
        # Within a batch the first page is the newest: of a prefix, the tail is evicted first.
        self._now_ns = time.time_ns()
        self._touches = presence.room.limits.evict
        self._refusal: int | None = None
        self._replaced = self._recycled = 0
        self._unsynced_dirs: set[str] = set()

    def run(self, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store every page; whether each is there afterwards."""
        stored: set[str] = set()
        absent: dict[str, Page] = {}
        for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            if self._deadline.passed():
                self._presence.counters.add("timeouts", len(hashes) - index)
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
                self._presence.room.remove(path, self._files.file_nbytes, self._deadline)
            stored.clear()
        return [page_hash in stored for page_hash in hashes]

    def _is_present(self, page_hash: str) -> bool:
        try:
            path = self._files.path(page_hash)
            found = self._files.check(path, page_hash, self._now_ns if self._touches else None)
            if found is Reading.WRONG:
                self._presence.heal(self._files, page_hash, self._deadline)
        except OSError as error:
            self._note(error)
            return False
        if self._synced and found is Reading.UNSYNCED:
            self._replaced += 1
            return False
        if self._synced and found is Reading.HIT:  # its writer may not have synced the name yet
            self._unsynced_dirs.add(os.path.dirname(path))
        return found in (Reading.HIT, Reading.UNSYNCED)

    def _write(self, absent: dict[str, Page]) -> list[str]:
        room = self._presence.room
        grant = room.reserve(len(absent), self._files.file_nbytes, self._deadline)
        written: list[str] = []
        todo = iter(absent.items())
        try:
            for tried, (page_hash, page) in enumerate(itertools.islice(todo, grant.pages)):
                if self._refusal is not None or self._presence.closing:
                    break
                if self._deadline.passed():
                    self._presence.counters.add("timeouts", grant.pages - tried)
                    break
                if self._store(page_hash, page, grant, self._now_ns - tried):
                    written.append(page_hash)
        finally:
            replaced = min(self._replaced, len(written))
            room.replaced(replaced * self._files.file_nbytes, self._deadline)
            room.settle(grant, len(written), self._deadline)
        self._presence.counters.add("recycled", self._recycled)
        missed = grant.pages - len(written)
        if self._refusal is not None:
            self._presence.counters.add("refused_no_space", missed)
        if self._refusal in _FULL:
            room.relieve(missed * grant.page_nbytes, self._deadline)
        return written

    def _store(self, page_hash: str, page: Page, grant: Grant, modified_ns: int) -> bool:
        """Write one page aside and publish it; where that fails nothing is left of it."""
        nonce = self._presence.writer.nonce()
        trailer = self._files.trailer(page_hash, nonce, synced=self._synced)
        spare = grant.spares.pop() if grant.spares else None
        try:
            try:
                self._attempt(page_hash, page, trailer, spare, modified_ns)
            except FileNotFoundError:
                self._presence.restore(self._deadline)
                self._attempt(page_hash, page, trailer, None, modified_ns)
        except OSError as error:
            if isinstance(error, StorageUnavailable) or error.errno in _WHOLE_STORE:
                raise
            self._note(error)
            return False
        return True

    def _attempt(
        self, page_hash: str, page: Page, trailer: bytes, spare: str | None, modified_ns: int
    ) -> None:
        path = spare or self._presence.writer.temp_path()
        try:
            self._fill(path, page, trailer, modified_ns, recycled=spare is not None)
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
            self._make_directory(os.path.dirname(target))
            os.rename(path, target)
        if self._synced:
            self._unsynced_dirs.add(os.path.dirname(target))

    def _make_directory(self, fan: str) -> None:
        """A key space's directories are made when its first pages need them."""
        layout = self._presence.layout
        with suppress(FileExistsError):
            try:
                os.mkdir(fan)
            except FileNotFoundError:
                layout.make_space(self._files.space, self._presence.writer.temp_path())
                os.mkdir(fan)
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
            self._presence.counters.add("io_errors")
        logger.debug("a page was not written: %s", error)
