"""`file`: one file a page under a directory that any number of processes share.

The trust in what is read is in `_page_file`, the sharing of room in `_room`, durability in `_saving`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

from hicache_backends.file.batch_writer import BatchWriter
from hicache_backends.file.capacity import Limits
from hicache_backends.file.descriptors import sync_directory
from hicache_backends.file.layout import Layout
from hicache_backends.file.ledger import NotALedger
from hicache_backends.file.page_file import (
    DIRECT_ALIGNMENT,
    TRAILER_NBYTES,
    PageFiles,
    Reading,
    takes_direct_writes,
)
from hicache_backends.file.process_state import ProcessState
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import (
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

__all__ = ["FileSettings", "FileStorage"]

logger = logging.getLogger(__name__)

# Threads beyond the processors only wait for each other: most of a cached read is a copy.
_PARALLELISM = min(4, os.cpu_count() or 1)
# A look at the clock costs a third of a look for a page.
_PAGES_A_LOOK = 16


class FileSettings(Settings):
    """The config of `file`."""

    path: str = Field(min_length=1)
    """The directory; made if it is missing. Everything that shares it shares its pages."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=TRAILER_NBYTES)
    """What all page files together may take; the least recently used go first. None: no limit."""
    min_free_nbytes: ByteSize = Field(default=0, ge=0)
    """What the pages leave free on the file system."""
    durability: Literal["crash", "power"] = "crash"
    """"power": bytes and names are on the disk before a set returns True."""
    recycle: bool = True
    """Overwrite victims in place, where that is safe, instead of unlinking them."""
    parallelism: int = Field(default=_PARALLELISM, ge=1)
    """Concurrent calls that the page store makes in each direction; 4, or fewer on fewer processors."""
    touch_interval_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """A get renews a page's recency if it is older than this. 0: every get does, exactly LRU."""
    timeout_s: PositiveSeconds = 30.0
    """What is not begun by then is a miss, or refused; exists and delete raise StorageTimeout."""


class FileStorage(HiCacheStorage):
    """Pages as files. Shared by threads, processes, ranks and models; survives all of them."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.POWER,
        shared=True,
        enumerable=True,
        overwrites=False,
        parallelism=_PARALLELISM,
    )
    usable_after_fork = True

    def __init__(self, settings: FileSettings) -> None:
        self._settings = settings
        self._files: dict[KeySpace, PageFiles] = {}
        self._layout = Layout(_made_root(settings.path))
        self._synced = settings.durability == "power"
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            min_free_nbytes=settings.min_free_nbytes,
            recycle=settings.recycle and not self._synced and is_local(self._layout.root),
        )
        self._presences = ForkLocal(
            self._presence_made, close=ProcessState.close, abandon=ProcessState.forget
        )
        with ExitStack() as undoing:
            undoing.callback(self._presences.close)
            self._declare()
            undoing.pop_all()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FileSettings.parse("file", config))

    def open_space(self, space: KeySpace) -> None:
        self.ensure_open()
        self._check_capacity(space)
        super().open_space(space)
        presence = self._presences.get()
        with self._translated():
            try:
                self._make_space(space, presence)
            except FileNotFoundError:
                presence.restore(Deadline(self._settings.timeout_s))
                self._make_space(space, presence)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        verdicts: list[bool] = []
        for index, page_hash in enumerate(hashes):
            if not index % _PAGES_A_LOOK:
                deadline.check(f"file: looking for {len(hashes)} pages")
            verdicts.append(self._is_there(files, page_hash))
        return verdicts

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        now_ns = time.time_ns()
        verdicts: list[bool] = []
        for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            if deadline.passed():
                self._counters.add("timeouts", len(hashes) - index)
                return verdicts + [False] * (len(hashes) - index)
            verdicts.append(self._get(files, page_hash, page, now_ns - index, deadline))
        return verdicts

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        presence = self._presences.get()
        with presence.saving(), self._translated():
            self.ensure_open()
            files = self._files_of(space)
            saving = BatchWriter(presence, files, synced=self._synced, deadline=deadline)
            return saving.run(hashes, pages)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        verdicts: list[bool] = []
        for page_hash in hashes:
            deadline.check(f"file: deleting {len(hashes)} pages")
            error = self._deleted(files, page_hash, deadline)
            verdicts.append(error is None)
        if any(verdicts):
            self._layout.check_there()
        return verdicts

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        return self._layout.key_spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        files = self._files_of(space)
        return (
            PageInfo(entry.name, files.nbytes)
            for entries in self._layout.pages(space.id)
            for entry in entries
            if self._is_there(files, entry.name)
        )

    def clear(self, space: KeySpace) -> int:
        """Remove all pages of `space`; how many whole ones that were.

        Raises:
            StorageUnavailable: Some could not be removed. The others are.
        """
        self.ensure_open()
        files = self._files_of(space)
        removed = failed = 0
        cause: OSError | None = None
        for entries in self._layout.pages(space.id):
            for entry in entries:
                whole = self._is_there(files, entry.name)
                error = self._deleted(files, entry.name, Deadline(self._settings.timeout_s))
                if error is not None:
                    failed, cause = failed + 1, cause or error
                elif whole:
                    removed += 1
        self._layout.check_there()
        if cause is not None:
            raise StorageUnavailable(
                f"file: {failed} pages of {files.directory} could not be removed"
                f" ({cause.strerror}); {removed} were: clear it again"
            ) from cause
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(
            nbytes=self._presences.get().ledger.used,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=self._counters.snapshot(),
        )

    def close(self) -> None:
        super().close()
        self._presences.close()

    # --- parts ---------------------------------------------------------------------------------------

    @property
    def _counters(self) -> Counters:
        return self._presences.get().counters

    def _is_there(self, files: PageFiles, page_hash: str) -> bool:
        try:
            return files.exists(page_hash)
        except OSError as error:
            self._note(error)
            return False

    def _get(
        self, files: PageFiles, page_hash: str, page: Page, now_ns: int, deadline: Deadline
    ) -> bool:
        if page.nbytes != files.nbytes:
            return False
        try:
            touched_ns = now_ns if self._limits.evict else None
            found = files.read(page_hash, page, touched_ns, self._settings.touch_interval_s)
            if found is Reading.WRONG:
                self._presences.get().heal(files, page_hash, deadline)
        except OSError as error:
            self._note(error)
            return False
        return found is Reading.HIT

    def _deleted(self, files: PageFiles, page_hash: str, deadline: Deadline) -> OSError | None:
        """Delete a page; the error, where it may still be there."""
        try:
            path = files.path(page_hash)
            self._presences.get().room.remove(path, files.file_nbytes, deadline)
        except OSError as error:
            self._note(error)
            return error
        return None

    def _note(self, error: OSError) -> None:
        self._counters.add("io_errors")
        logger.debug("a page's file is in trouble: %s", error)

    def _files_of(self, space: KeySpace) -> PageFiles:
        files = self._files.get(space)
        if files is None:
            files = self._files[space] = PageFiles(self._layout, space)
        return files

    def _make_space(self, space: KeySpace, presence: ProcessState) -> None:
        made = self._layout.make_space(space, presence.writer.temp_path())
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

    def _presence_made(self) -> ProcessState:
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
    def _translated(self) -> Generator[None]:
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
        if takes_direct_writes(self._presences.get().writer.temp_path()):
            self.narrow(alignment=DIRECT_ALIGNMENT)


def _made_root(path: str) -> str:
    """The directory at `path`, absolute, made where it was missing."""
    try:
        root = os.path.abspath(os.path.expanduser(path))
        Layout(root).make()
    except ValueError as error:
        raise ConfigError(f"file: path: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"file: path: {path} is no directory and cannot be made one ({error.strerror}):"
            " name another"
        ) from error
    return root
