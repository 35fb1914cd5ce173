"""`file` as a HiCacheStorage: one file per page, proved by its trailer, in a shared capacity."""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.file.batch_writer import BatchWriter
from hicache_backends.file.capacity import Limits
from hicache_backends.file.clock import RootClock
from hicache_backends.file.healing import heal
from hicache_backends.file.layout import Layout
from hicache_backends.file.ledger import NotALedger
from hicache_backends.file.page_file import TRAILER_NBYTES
from hicache_backends.file.process_state import ProcessState
from hicache_backends.file.reader import FileReader
from hicache_backends.file.settings import FileSettings
from hicache_storage import native
from hicache_storage.backend_support.capacity import page_over_capacity
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.filesystem import is_local, sync_directory
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.manifest import SPACE_ID
from hicache_storage.errors import (
    ConfigError,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.settings import counted
from hicache_storage.storage import HiCacheStorage, StorageStats

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hicache_backends.file.page_file import PageFiles
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_LIMITS = {"capacity_nbytes", "min_free_nbytes"}
_LOOK_INTERVAL_S = 5.0
"""How often a storage that writes checks that its key space still has a manifest."""


class FileStorage(FileReader):
    """A storage with one file per page.

    Threads, processes, ranks and models share the pages, and the pages outlive all of these.
    """

    def __init__(self, settings: FileSettings) -> None:
        super().__init__(settings, Layout.create(settings.path))
        self._synced = settings.durability == "power"
        recycle = settings.recycle and not self._synced and is_local(self._layout.root)
        self._limits = Limits.of(settings, recycle=recycle)
        self._clock = RootClock(self._layout.usage)
        self._process = ForkLocal(
            self._open_root, close=ProcessState.close, abandon=ProcessState.abandon
        )
        with ExitStack() as undo:
            undo.callback(self._process.close)
            if self._synced:
                self._sync_root()
            self._process.get()  # makes the files that `declare` looks at
            self.declare(settings)
            self._layout.warn_of_misuse(settings.capacity_nbytes)
            undo.pop_all()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FileSettings.parse("file", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> HiCacheStorage:
        """Open a `FileReader`.

        If a subclass calls this, open the subclass without its limits, because it may read
        differently.
        """
        if cls is FileStorage:
            return FileReader.from_config(config)
        storage = cls.from_config({name: config[name] for name in config.keys() - _LIMITS})
        storage.declare(FileSettings.parse("file", config))
        return storage

    def open_space(self, space: KeySpace) -> None:
        self.ensure_open()
        self._check_capacity(space)
        super().open_space(space)
        process = self._process.get()
        with self._translate_errors():
            self._make_space(space, process)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        touched_ns = self._clock.now_ns() if self._limits.evict else None
        found = self._read(space, hashes, pages, touched_ns, deadline)
        for page_hash, verdict in zip(hashes, found, strict=True):
            if verdict == native.WRONG:
                self._heal(self._files_of(space), page_hash, deadline)
        return [verdict == native.HIT for verdict in found]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        process = self._process.get()
        files = self._files_of(space)
        is_look_due = time.monotonic() >= files.next_look_s
        if is_look_due:
            self._layout.refuse_link(files.directory)
        with process.writing(), self._translate_errors():
            self.ensure_open()
            writer = BatchWriter(process, files, synced=self._synced, deadline=deadline)
            verdicts = writer.run(hashes, pages)
        if is_look_due and any(verdicts):
            # If a program removes the directory meanwhile, pages may be left without a manifest.
            files.next_look_s = time.monotonic() + _LOOK_INTERVAL_S
            with suppress(OSError):
                self._make_space(space, process)
        return verdicts

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        verdicts: list[bool] = []
        for page_hash in hashes:
            deadline.check(f"file: deleting {counted(len(hashes), 'page')}")
            error = self._delete(files, page_hash, deadline)
            verdicts.append(error is None)
        if any(verdicts):
            self._layout.check_exists()
        return verdicts

    def clear(self, space: KeySpace) -> int:
        """Remove all pages of `space`. Return how many of them were whole.

        Raises:
            StorageUnavailable: Some pages could not be removed. The other pages are gone.
        """
        self.ensure_open()
        removed = self._remove_pages(space.id, space.stored_nbytes + TRAILER_NBYTES)
        self._layout.check_exists()
        return removed

    def remove_space(self, space_id: str) -> int:
        self.ensure_open()
        if not SPACE_ID.fullmatch(space_id):
            return 0
        self._layout.refuse_link(self._layout.space_dir(space_id))
        with self._translate_errors():
            space = self._layout.key_space(space_id)
            page_nbytes = None if space is None else space.stored_nbytes + TRAILER_NBYTES
            removed = self._remove_pages(space_id, page_nbytes)
            self._layout.remove_shards(space_id)
            self._layout.remove_space_dir(space_id, self._process.get().writer.temp_path())
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

    def _heal(self, files: PageFiles, page_hash: str, deadline: Deadline) -> None:
        try:
            heal(self._process.get(), files, page_hash, deadline)
        except OSError as error:
            self._note(error)

    def _delete(self, files: PageFiles, page_hash: str, deadline: Deadline) -> OSError | None:
        """Delete a page. Return an error if the page may still be there."""
        try:
            return self._unlink(files.path(page_hash), files.file_nbytes, deadline)
        except OSError as error:
            self._note(error)
            return error

    def _unlink(self, path: str, nbytes: int, deadline: Deadline) -> OSError | None:
        try:
            self._process.get().capacity.remove(path, nbytes, deadline)
        except OSError as error:
            self._note(error)
            return error
        return None

    def _remove_pages(self, space_id: str, page_nbytes: int | None) -> int:
        """Remove the page files of a key space. Return how many of them were whole.

        Without `page_nbytes` the size of a page is unknown, and every file counts as whole.
        """
        removed = failed = 0
        cause: OSError | None = None
        directory = self._layout.space_dir(space_id)
        for hashes in self._layout.pages(space_id):
            paths = [f"{directory}/{page_hash[:2]}/{page_hash}" for page_hash in hashes]
            found, _, sizes = native.stat_files([os.fsencode(path) for path in paths], math.inf)
            for path, verdict, nbytes in zip(paths, found, sizes, strict=True):
                deadline = Deadline(self._settings.timeout_s)
                error = self._unlink(path, page_nbytes or nbytes, deadline)
                if error is not None:
                    failed, cause = failed + 1, cause or error
                elif verdict == native.HIT and page_nbytes in (None, nbytes):
                    removed += 1
        if cause is not None:
            raise StorageUnavailable(
                f"file: could not remove {counted(failed, 'page')} of {directory}"
                f" ({cause.strerror}), but removed {removed:,}: try again"
            ) from cause
        return removed

    def _make_space(self, space: KeySpace, process: ProcessState) -> None:
        try:
            made = self._layout.make_space(space, process.writer.temp_path())
        except FileNotFoundError:
            process.restore_writer(Deadline(self._settings.timeout_s))
            made = self._layout.make_space(space, process.writer.temp_path())
        if made and self._synced:
            for path in (self._layout.space_dir(space.id), self._layout.spaces):
                sync_directory(path)

    def _check_capacity(self, space: KeySpace) -> None:
        capacity, needed = self._settings.capacity_nbytes, space.stored_nbytes + TRAILER_NBYTES
        if capacity is not None and needed > capacity:
            raise UnsupportedOperation(page_over_capacity("file", space, needed, capacity))

    def _open_root(self) -> ProcessState:
        try:
            return ProcessState(self._layout, self._limits, self._clock, Counters())
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

    def _sync_root(self) -> None:
        """Sync the names that lead to the pages, as `durability: power` promises."""
        try:
            sync_directory(os.path.dirname(self._layout.root))
            sync_directory(self._layout.root)
        except OSError as error:
            raise ConfigError(
                f"file: durability: power has to sync {error.filename or self._layout.root}, but"
                f" cannot ({error.strerror}): let this user read it, or choose crash"
            ) from error
