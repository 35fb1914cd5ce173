"""`file` as a HiCacheStorage: one file a page, trusted by its trailer, within a shared capacity."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.file.batch_writer import BatchWriter
from hicache_backends.file.capacity import Limits
from hicache_backends.file.layout import Layout
from hicache_backends.file.ledger import NotALedger
from hicache_backends.file.page_file import (
    TRAILER_NBYTES,
    PageFiles,
    takes_direct_files,
)
from hicache_backends.file.process_state import ProcessState
from hicache_backends.file.settings import DEFAULT_PARALLELISM, FileSettings
from hicache_storage import native
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local, sync_directory
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.vectored_io import DIRECT_ALIGNMENT
from hicache_storage.errors import (
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

logger = logging.getLogger(__name__)

_MOST_SPACES = 4096


class FileStorage(HiCacheStorage):
    """Pages as files. Shared by threads, processes, ranks and models; survives all of them."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.POWER,
        shared=True,
        enumerable=True,
        overwrites=False,
        parallelism=DEFAULT_PARALLELISM,
        revocable=True,
    )
    usable_after_fork = True

    def __init__(self, settings: FileSettings) -> None:
        self._settings = settings
        self._files: dict[KeySpace, PageFiles] = {}
        self._layout = Layout.create(settings.path)
        self._synced = settings.durability == "power"
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            min_free_nbytes=settings.min_free_nbytes,
            recycle=settings.recycle and not self._synced and is_local(self._layout.root),
        )
        self._process = ForkLocal(
            self._open_root, close=ProcessState.close, abandon=ProcessState.abandon
        )
        with ExitStack() as undo:
            undo.callback(self._process.close)
            self._declare()
            self._layout.warn_of_misuse(settings.capacity_nbytes)
            undo.pop_all()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FileSettings.parse("file", config))

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        return Layout.missing_root(FileSettings.parse("file", config).path)

    def open_space(self, space: KeySpace) -> None:
        self.ensure_open()
        self._check_capacity(space)
        super().open_space(space)
        process = self._process.get()
        with self._translate_errors():
            try:
                self._make_space(space, process)
            except FileNotFoundError:
                process.restore_writer(Deadline(self._settings.timeout_s))
                self._make_space(space, process)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        found = files.exists(hashes, deadline)
        if native.LATE in found:
            deadline.check(f"file: looking for {len(hashes)} pages")
        self._note_errors(found)
        return [verdict == native.HIT for verdict in found]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        fitting = [index for index, page in enumerate(pages) if page.nbytes == files.nbytes]
        found = files.read(
            [hashes[index] for index in fitting],
            [pages[index] for index in fitting],
            time.time_ns() if self._limits.evict else None,
            self._settings.touch_interval_s,
            deadline,
        )
        self._note_errors(found)
        if late := found.count(native.LATE):
            self._counters.add("timeouts", late)
        verdicts = [False] * len(hashes)
        for index, verdict in zip(fitting, found, strict=True):
            verdicts[index] = verdict == native.HIT
            if verdict == native.WRONG:
                self._heal(files, hashes[index], deadline)
        return verdicts

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        process = self._process.get()
        with process.writing(), self._translate_errors():
            self.ensure_open()
            files = self._files_of(space)
            writer = BatchWriter(process, files, synced=self._synced, deadline=deadline)
            return writer.run(hashes, pages)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        verdicts: list[bool] = []
        for page_hash in hashes:
            deadline.check(f"file: deleting {len(hashes)} pages")
            error = self._delete(files, page_hash, deadline)
            verdicts.append(error is None)
        if any(verdicts):
            self._layout.check_exists()
        return verdicts

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        return self._layout.key_spaces(skip_unreadable=True)

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        files = self._files_of(space)
        return (
            PageInfo(page_hash, files.nbytes)
            for hashes in self._layout.pages(space.id)
            for page_hash in hashes
            if self._is_there(files, page_hash)
        )

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the times of the files. With a capacity they are those of the last use."""
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        verdicts, modified_ns = self._files_of(space).modified_ns(hashes, deadline)
        if native.LATE in verdicts:
            deadline.check(f"file: looking at the times of {len(hashes)} pages")
        self._note_errors(verdicts)
        field = "used_at_s" if self._limits.evict else "written_at_s"
        return [
            PageTimes(**{field: modified_ns[one] / 1e9}) if one in modified_ns else PageTimes()
            for one in hashes
        ]

    def clear(self, space: KeySpace) -> int:
        """Remove all pages of `space`, and return the number of the whole pages among them.

        Raises:
            StorageUnavailable: Some pages could not be removed. The others are gone.
        """
        self.ensure_open()
        files = self._files_of(space)
        removed = failed = 0
        cause: OSError | None = None
        for hashes in self._layout.pages(space.id):
            for page_hash in hashes:
                whole = self._is_there(files, page_hash)
                error = self._delete(files, page_hash, Deadline(self._settings.timeout_s))
                if error is not None:
                    failed, cause = failed + 1, cause or error
                elif whole:
                    removed += 1
        self._layout.check_exists()
        if cause is not None:
            raise StorageUnavailable(
                f"file: {failed} pages of {files.directory} could not be removed"
                f" ({cause.strerror}); {removed} were: clear it again"
            ) from cause
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(
            nbytes=self._process.get().ledger.used,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=self._counters.snapshot(),
        )

    def close(self) -> None:
        super().close()
        self._process.close()

    # --- parts ---------------------------------------------------------------------------------------

    @property
    def _counters(self) -> Counters:
        return self._process.get().counters

    def _is_there(self, files: PageFiles, page_hash: str) -> bool:
        (verdict,) = files.exists([page_hash], Deadline(self._settings.timeout_s))
        self._note_errors([verdict])
        return verdict == native.HIT

    def _heal(self, files: PageFiles, page_hash: str, deadline: Deadline) -> None:
        try:
            self._process.get().heal(files, page_hash, deadline)
        except OSError as error:
            self._note(error)

    def _note_errors(self, verdicts: Sequence[int]) -> None:
        for verdict in verdicts:
            if verdict < 0:
                self._note(OSError(-verdict, os.strerror(-verdict)))

    def _delete(self, files: PageFiles, page_hash: str, deadline: Deadline) -> OSError | None:
        """Delete a page; return the error after which the page may still be there."""
        try:
            path = files.path(page_hash)
            self._process.get().capacity.remove(path, files.file_nbytes, deadline)
        except OSError as error:
            self._note(error)
            return error
        return None

    def _note(self, error: OSError) -> None:
        self._counters.add("io_errors")
        logger.debug("a page's file cannot be used: %s", error)

    def _files_of(self, space: KeySpace) -> PageFiles:
        files = self._files.get(space)
        if files is None:
            if len(self._files) >= _MOST_SPACES:  # tenants and salts are the clients' choice
                self._files.clear()
            files = self._files[space] = PageFiles(self._layout, space)
        return files

    def _make_space(self, space: KeySpace, process: ProcessState) -> None:
        made = self._layout.make_space(space, process.writer.temp_path())
        if made and self._synced:
            for path in (self._layout.space_dir(space.id), self._layout.spaces):
                sync_directory(path)

    def _check_capacity(self, space: KeySpace) -> None:
        capacity, needed = self._settings.capacity_nbytes, space.stored_nbytes + TRAILER_NBYTES
        if capacity is not None and needed > capacity:
            raise UnsupportedOperation(
                f"file: capacity_nbytes is {capacity}, and one page of pool {space.pool!r} of"
                f" {space.model!r} takes {needed} bytes: raise it, or use a smaller page size"
            )

    def _open_root(self) -> ProcessState:
        try:
            return ProcessState(self._layout, self._limits, Counters())
        except NotALedger as error:
            raise ConfigError(
                f"file: path: {self._layout.root} is in use by another program: {error.strerror};"
                " name another directory, or remove that file"
            ) from error
        except OSError as error:
            raise self._unavailable(error) from error

    @contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except (StorageUnavailable, StorageTimeout):
            raise
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(
            f"file: {self._layout.root} cannot be written to: {error.strerror}"
        )

    def _declare(self) -> None:
        self.narrow(parallelism=self._settings.parallelism)
        if self._limits.evict:
            self.narrow(retention=Retention.UNTIL_PRESSURE)
        if self._limits.capacity_nbytes is not None:
            self.narrow(max_page_nbytes=self._limits.capacity_nbytes - TRAILER_NBYTES)
        if not self._synced:
            self.narrow(durability=Durability.CRASH)
            return
        try:
            sync_directory(os.path.dirname(self._layout.root))
            sync_directory(self._layout.root)
        except OSError as error:
            raise ConfigError(
                f"file: durability: power needs to sync {error.filename or self._layout.root} and"
                f" cannot ({error.strerror}): let this user read it, or choose crash"
            ) from error
        if takes_direct_files(self._process.get().writer.temp_path()):
            self.narrow(alignment=DIRECT_ALIGNMENT)
