"""`file`: one file a page under a directory that any number of processes share.

The trust in what is read is in `_page_file`, the sharing of room in `_room`, durability in `_saving`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self

from hicache_backends.file._filesystem import sync_directory
from hicache_backends.file._layout import Layout
from hicache_backends.file._page_file import (
    DIRECT_ALIGNMENT,
    PageFiles,
    Reading,
    takes_direct_writes,
)
from hicache_backends.file._presence import Presence
from hicache_backends.file._room import Limits
from hicache_backends.file._saving import Saving
from hicache_storage.counters import Counters
from hicache_storage.errors import ConfigError, StorageUnavailable
from hicache_storage.file_system import is_local
from hicache_storage.per_process import PerProcess
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
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

__all__ = ["FileSettings", "FileStorage"]

logger = logging.getLogger(__name__)

# Threads beyond the processors only wait for each other: most of a cached read is a copy.
_PARALLELISM = min(4, os.cpu_count() or 1)


class FileSettings(Settings):
    """The config of `file`."""

    path: str = Field(min_length=1)
    """The directory; made if it is missing. Everything that shares it shares its pages."""
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
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
    """Pages that a call has not begun by then are misses, or refused."""


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
        self._lock = threading.Lock()
        self._files: dict[KeySpace, PageFiles] = {}
        self._layout = Layout(_made_root(settings.path))
        synced = settings.durability == "power"
        self._limits = Limits(
            capacity_nbytes=settings.capacity_nbytes,
            min_free_nbytes=settings.min_free_nbytes,
            recycle=settings.recycle and not synced and is_local(self._layout.root),
        )
        self._presences = PerProcess(
            self._presence_made, close=Presence.close, abandon=Presence.forget
        )
        self._declare(synced=synced)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(FileSettings.parse("file", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        presence = self._presences.get()
        try:
            made = self._layout.make_space(space, presence.writer.temp_path())
            if made and self._settings.durability == "power":
                for path in (self._layout.space_dir(space.id), self._layout.spaces):
                    sync_directory(path)
        except OSError as error:
            raise self._unavailable(error) from error

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        files = self._files_of(space)
        return [files.exists(page_hash) for page_hash in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        files = self._files_of(space)
        deadline_s = time.monotonic() + self._settings.timeout_s
        now_ns = time.time_ns()
        verdicts: list[bool] = []
        for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True)):
            if time.monotonic() > deadline_s:
                self._counters.add("timeouts", len(hashes) - index)
                return verdicts + [False] * (len(hashes) - index)
            verdicts.append(self._get(files, page_hash, page, now_ns - index))
        return verdicts

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        presence = self._presences.get()
        with presence.saving():
            self.ensure_open()
            saving = Saving(
                presence,
                self._files_of(space),
                synced=self._settings.durability == "power",
                deadline_s=time.monotonic() + self._settings.timeout_s,
            )
            try:
                return saving.run(hashes, pages)
            except StorageUnavailable:
                raise
            except OSError as error:
                raise self._unavailable(error) from error

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        files = self._files_of(space)
        return [self._delete(files, files.path(page_hash)) for page_hash in hashes]

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        return self._layout.key_spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        files = self._files_of(space)
        return (
            PageInfo(entry.name, files.nbytes)
            for entry in self._layout.pages(space.id)
            if files.exists(entry.name)
        )

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        files = self._files_of(space)
        removed = 0
        for entry in self._layout.pages(space.id):
            whole = files.exists(entry.name)
            if self._delete(files, entry.path) and whole:
                removed += 1
        return removed

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(
            nbytes=self._presences.get().ledger.used,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=self._counters.snapshot(),
        )

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._presences.close()
            super().close()

    # --- parts ---------------------------------------------------------------------------------------

    def _get(self, files: PageFiles, page_hash: str, page: Page, now_ns: int) -> bool:
        if page.nbytes != files.nbytes:
            return False
        try:
            touched_ns = now_ns if self._limits.evict else None
            found = files.read(page_hash, page, touched_ns, self._settings.touch_interval_s)
            if found is Reading.WRONG:
                self._presences.get().heal(files, page_hash)
        except OSError as error:
            self._counters.add("io_errors")
            logger.debug("a page was not read: %s", error)
            return False
        return found is Reading.HIT

    def _delete(self, files: PageFiles, path: str) -> bool:
        try:
            self._presences.get().room.remove(path, files.file_nbytes)
        except OSError as error:
            self._counters.add("io_errors")
            logger.debug("a page was not deleted: %s", error)
            return False
        return True

    def _files_of(self, space: KeySpace) -> PageFiles:
        files = self._files.get(space)
        if files is None:
            files = self._files[space] = PageFiles(self._layout, space)
        return files

    def _presence_made(self) -> Presence:
        self._counters = Counters()
        try:
            return Presence(self._layout, self._limits, self._counters)
        except OSError as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StorageUnavailable:
        return StorageUnavailable(
            f"file: {self._layout.root} cannot be written to: {error.strerror}"
        )

    def _declare(self, *, synced: bool) -> None:
        self.narrow(parallelism=self._settings.parallelism)
        if self._limits.evict:
            self.narrow(retention=Retention.UNTIL_PRESSURE)
        if not synced:
            self.narrow(durability=Durability.CRASH)
            return
        sync_directory(os.path.dirname(self._layout.root))
        sync_directory(self._layout.root)
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
