"""Write one batch of pages, from the first check to the last sync."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from hicache_backends.file.healing import heal
from hicache_storage import native
from hicache_storage.backend_support.copies import private_copy
from hicache_storage.backend_support.filesystem import sync_directory
from hicache_storage.backend_support.revocable import states_of
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
# After these errors no page can be written: the file system is read-only, or its server or device
# is gone.
_WHOLE_STORE = frozenset({errno.EROFS, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENODEV, errno.ENXIO})
# A directory is missing, or another user owns the file to overwrite: `_store` can work around both.
_REPAIRABLE = frozenset({errno.ENOENT, errno.EPERM, errno.EACCES})


class BatchWriter:
    """A writer of one batch: it writes the pages that are not stored yet. One thread uses it, once."""

    def __init__(
        self, process: ProcessState, files: PageFiles, *, synced: bool, deadline: Deadline
    ) -> None:
        self._process = process
        self._files = files
        self._synced = synced
        self._deadline = deadline
        # The first page of a batch gets the newest time, so that eviction takes the tail of a
        # prefix first.
        self._now_ns = process.clock.now_ns()
        self._renews_recency = process.capacity.limits.evict
        self._refusal: int | None = None
        """The errno with which the file system refused a page."""
        self._replaced = self._recycled = 0
        self._unsynced_dirs: set[str] = set()
        self._late: set[str] = set()
        """The pages that were not checked before the deadline."""

    def run(self, hashes: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store every page. Return for each page whether it is stored now."""
        candidates: dict[str, Page] = {}
        for page_hash, page in zip(hashes, pages, strict=True):
            if page.nbytes == self._files.nbytes:
                candidates.setdefault(page_hash, page)
        stored = self._present(list(candidates))
        late = sum(page_hash in self._late for page_hash in hashes)
        self._process.counters.add("timeouts", late)
        absent = {
            page_hash: page
            for page_hash, page in candidates.items()
            if page_hash not in stored and page_hash not in self._late
        }
        if absent:
            stored.update(self._write(absent))
        if self._unsynced_dirs and not self._sync():
            for page_hash in absent:
                path = self._files.path(page_hash)
                self._process.capacity.remove(path, self._files.file_nbytes, self._deadline)
            stored.clear()
        return [page_hash in stored for page_hash in hashes]

    def _present(self, hashes: list[str]) -> set[str]:
        """Return the pages that are already stored, and touch them."""
        touched_ns = self._now_ns if self._renews_recency else None
        stored: set[str] = set()
        for page_hash, verdict in zip(
            hashes, self._files.check(hashes, touched_ns, self._deadline), strict=True
        ):
            if verdict == native.LATE:
                self._late.add(page_hash)
            elif self._counts_as_stored(page_hash, verdict):
                stored.add(page_hash)
        return stored

    def _counts_as_stored(self, page_hash: str, verdict: int) -> bool:
        if verdict < 0:
            self._note(OSError(-verdict, os.strerror(-verdict)))
        elif verdict == native.WRONG:
            try:
                heal(self._process, self._files, page_hash, self._deadline)
            except OSError as error:
                self._note(error)
        elif self._synced and verdict == native.UNSYNCED:
            self._replaced += 1
            return False
        elif self._synced and verdict == native.HIT:  # its writer may not have synced the name yet
            self._unsynced_dirs.add(os.path.dirname(self._files.path(page_hash)))
        return verdict in (native.HIT, native.UNSYNCED)

    def _write(self, absent: dict[str, Page]) -> list[str]:
        """Write pages. If the file system is full, evict others once, and write the rest then."""
        written, refused = self._write_granted(absent)
        may_evict = self._process.capacity.limits.evict and not self._deadline.passed()
        if refused and self._refusal in _FULL and may_evict:
            self._refusal = None
            more, refused = self._write_granted(refused, is_full=True)
            written += more
        self._process.counters.add("recycled", self._recycled)
        if self._refusal is not None:
            self._process.counters.add("refused_no_space", len(refused))
        return written

    def _write_granted(
        self, absent: dict[str, Page], *, is_full: bool = False
    ) -> tuple[list[str], dict[str, Page]]:
        """Write as many pages as the capacity allows. Return those, and the ones that failed."""
        capacity = self._process.capacity
        grant = capacity.reserve(
            len(absent), self._files.file_nbytes, self._deadline, is_full=is_full
        )
        written: list[str] = []
        todo = list(itertools.islice(absent.items(), grant.pages))
        try:
            done = 0
            while done < len(todo) and self._may_store():
                if self._deadline.passed():
                    self._process.counters.add("timeouts", len(todo) - done)
                    break
                done += self._write_some(todo[done:], done, grant, written)
        except Exception:
            self._settle(grant, len(written))
            raise
        except BaseException:  # pages may be stored that are missing in `written`
            found = self._files.exists([page_hash for page_hash, _ in todo], self._deadline)
            capacity.abandon(len(found) - found.count(native.MISS), self._deadline)
            raise
        self._settle(grant, len(written))
        stored = set(written)
        return written, {h: page for h, page in todo if h not in stored}

    def _settle(self, grant: Grant, written: int) -> None:
        capacity, replaced = self._process.capacity, min(self._replaced, written)
        self._replaced -= replaced
        capacity.release_replaced(replaced * self._files.file_nbytes, self._deadline)
        capacity.settle(grant, written, self._deadline)

    def _write_some(
        self, todo: list[tuple[str, Page]], start: int, grant: Grant, written: list[str]
    ) -> int:
        """Write pages in one call of the data plane. Return how many pages were tried.

        If the data plane cannot write a page, write this page alone, in Python. That happens if
        pages must be synced, if an evicted file may not be overwritten, or if a directory is
        missing.
        """
        verdicts = [] if self._synced else self._try(todo, start, grant)
        tried = list(zip(todo, verdicts or [native.KEPT], strict=False))
        written += [page_hash for (page_hash, _), verdict in tried if verdict == native.HIT]
        for index, ((page_hash, page), verdict) in enumerate(tried):
            if verdict == native.MISS:
                return index
            if verdict in (native.HIT, native.REVOKED):
                continue
            if verdict < 0 and -verdict not in _REPAIRABLE:
                self._note_failure(OSError(-verdict, os.strerror(-verdict)))
            elif verdict == native.LATE or self._deadline.passed():
                self._process.counters.add("timeouts")
            elif self._may_store() and self._store(
                page_hash, page, grant, self._now_ns - start - index
            ):
                written.append(page_hash)
        return len(tried)

    def _may_store(self) -> bool:
        return self._refusal is None and not any(self._process.stop)

    def _try(self, todo: list[tuple[str, Page]], start: int, grant: Grant) -> list[int]:
        """Write pages that need no sync. Return the verdicts of the data plane.

        The list stops before the first page whose path cannot be used.
        """
        files, writer = self._files, self._process.writer
        hashes = [page_hash for page_hash, _ in todo]
        broken = files.unusable(hashes)
        hashes = list(itertools.takewhile(lambda page_hash: page_hash[:2] not in broken, hashes))
        todo = todo[: len(hashes)]
        targets, names = files.files(hashes)
        for shard in {page_hash[:2] for page_hash in hashes}:
            path = f"{files.directory}/{shard}"
            if not files.has_shard(path):
                with suppress(OSError):  # then each page of this directory is written alone
                    self._make_shard(path)
        recycled = [grant.recyclable.pop() for _ in todo[: len(grant.recyclable)]]
        paths = [*recycled, *(writer.temp_path() for _ in todo[len(recycled) :])]
        verdicts = native.write_files(
            [os.fsencode(path) for path in paths],
            targets,
            writer.trailers(names, synced=False),
            [page.segments for _, page in todo],
            files.nbytes,
            self._now_ns - start,
            len(recycled),
            self._deadline.end_s,
            self._process.stop,
            states_of(page for _, page in todo),
        )
        for path, verdict in zip(recycled, verdicts, strict=False):
            self._recycled += verdict == native.HIT
            if verdict in (native.KEPT, native.LATE, native.MISS):
                grant.recyclable.append(path)
        return verdicts

    def _store(self, page_hash: str, page: Page, grant: Grant, modified_ns: int) -> bool:
        """Write one page to a temporary file and publish it. A failure leaves nothing behind."""
        own = private_copy(page)
        if own is None:
            return False
        _, names = self._files.files([page_hash])
        (trailer,) = self._process.writer.trailers(names, synced=self._synced)
        recycled = bool(grant.recyclable)
        path = grant.recyclable.pop() if recycled else self._temp_path(grant)
        try:
            try:
                self._attempt(page_hash, own, trailer, path, modified_ns, recycled=recycled)
            except FileNotFoundError:
                self._process.restore_writer(self._deadline)
                path = self._temp_path(grant)
                self._attempt(page_hash, own, trailer, path, modified_ns, recycled=False)
        except OSError as error:
            self._note_failure(error)
            return False
        return True

    def _temp_path(self, grant: Grant) -> str:
        grant.files.append(self._process.writer.temp_path())
        return grant.files[-1]

    def _attempt(
        self,
        page_hash: str,
        page: Page,
        trailer: bytes,
        path: str,
        modified_ns: int,
        *,
        recycled: bool,
    ) -> None:
        try:
            self._fill(path, page, trailer, modified_ns, recycled=recycled)
            self._publish(path, page_hash)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def _fill(
        self, path: str, page: Page, trailer: bytes, modified_ns: int, *, recycled: bool
    ) -> None:
        if recycled:
            with suppress(PermissionError):  # we may claim another user's file, but not write to it
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
        """Make a directory of pages and, if it is missing, the key space's directory around it."""
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

    def _note_failure(self, error: OSError) -> None:
        """Raise the error if it concerns the whole store. Otherwise only note it."""
        if isinstance(error, StorageUnavailable) or error.errno in _WHOLE_STORE:
            raise error
        self._note(error)

    def _note(self, error: OSError) -> None:
        if error.errno in _REFUSALS:
            self._refusal = error.errno
        else:
            self._process.counters.add("io_errors")
        logger.debug("a page was not written: %s", error)
