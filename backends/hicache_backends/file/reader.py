"""The reading half of `file`: a storage that reads a root and changes nothing there."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.file.capacity import Limits
from hicache_backends.file.layout import Layout
from hicache_backends.file.ledger import read_used
from hicache_backends.file.page_file import TRAILER_NBYTES, PageFiles
from hicache_backends.file.settings import DEFAULT_PARALLELISM, FileSettings
from hicache_storage import native
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.read_only import Reader, over_capacity
from hicache_storage.backend_support.vectored_io import DIRECT_ALIGNMENT, takes_direct_reads
from hicache_storage.settings import counted, format_nbytes
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    PageFault,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import UnreadableSpace

logger = logging.getLogger(__name__)

_MOST_SPACES = 4096
"""How many key spaces are remembered.

Clients decide how many there are, by their tenants and salts.
"""


class FileReader(Reader):
    """A read-only storage of pages in files. It has no writer, ledger or limits, and removes no file."""

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

    def __init__(self, settings: FileSettings, layout: Layout) -> None:
        self._settings = settings
        self._layout = layout
        self._files_of = lru_cache(_MOST_SPACES)(partial(PageFiles, layout))
        self._limits = Limits.of(settings)
        self._own_counters = Counters()
        self._used = read_used(layout.usage)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        settings = FileSettings.parse("file", config)
        reader = cls(settings, Layout.at(settings.path))
        reader.declare(settings)
        return reader

    @classmethod
    def would_claim(cls, config: Mapping[str, Any]) -> Capabilities:
        """Return the claims of a store on a disk that takes O_DIRECT, as almost all disks do."""
        return _claims(cls.capabilities, FileSettings.parse("file", config), direct=True)

    def declare(self, settings: FileSettings) -> None:
        """Claim what these settings and the place allow, in the same way for both openings."""
        usage = self._layout.usage
        direct = takes_direct_reads(usage if os.path.exists(usage) else self._layout.a_manifest())
        vars(self)["capabilities"] = _claims(self.capabilities, settings, direct=direct)

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        return Layout.missing_root(FileSettings.parse("file", config).path)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        files = self._files_of(space)
        found = files.exists(hashes, deadline)
        if native.LATE in found:
            deadline.check(f"file: looking for {counted(len(hashes), 'page')}")
        self._note_errors(found)
        return [verdict == native.HIT for verdict in found]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        found = self._read(space, hashes, pages, None, Deadline(self._settings.timeout_s))
        return [verdict == native.HIT for verdict in found]

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
        """Return the times of the last write.

        If pages are evicted, return the times of the last use instead.
        """
        self.ensure_open()
        deadline = Deadline(self._settings.timeout_s)
        verdicts, modified_ns, _ = self._files_of(space).stat(hashes, deadline)
        if native.LATE in verdicts:
            deadline.check(f"file: looking at the times of {counted(len(hashes), 'page')}")
        self._note_errors(verdicts)
        field = "used_at_s" if self._limits.evict else "written_at_s"
        within_s = self._settings.touch_interval_s if self._limits.evict else 0.0
        return [
            PageTimes(**{field: at_ns / 1e9}, used_within_s=within_s)
            if verdict == native.HIT
            else PageTimes()
            for verdict, at_ns in zip(verdicts, modified_ns, strict=True)
        ]

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        self.ensure_open()
        files = self._files_of(space)
        if hashes is not None:
            return self._faults_of(files, hashes)
        listings = self._layout.pages(space.id)
        return (
            fault
            for listed in listings
            for fault in self._faults_of(files, listed, sizes_only=True)
        )

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        self.ensure_open()
        return self._layout.unreadable_spaces()

    def diagnose(self) -> list[Diagnosis]:
        self.ensure_open()
        capacity, used = self._settings.capacity_nbytes, read_used(self._layout.usage)
        if capacity is not None and used is not None and used > capacity:
            return [over_capacity(used, capacity, used - capacity)]
        page_nbytes = max((space.stored_nbytes for space in self.spaces()), default=0)
        room = [] if capacity is None or used is None else [capacity - used]
        if self._limits.min_free_nbytes:
            with suppress(OSError):
                system = os.statvfs(self._layout.root)
                room.append(system.f_bavail * system.f_frsize - self._limits.min_free_nbytes)
        if not room:
            return []
        free_nbytes = max(0, min(room))
        if free_nbytes >= page_nbytes + TRAILER_NBYTES:
            fact = f"{format_nbytes(free_nbytes)} are free"
            return [Diagnosis("capacity", fact, free_nbytes=free_nbytes)]
        fact = "the store is at its limit: a new page evicts the least recently used ones"
        return [Diagnosis("capacity", fact, is_full=True, free_nbytes=free_nbytes)]

    def stats(self) -> StorageStats:
        """Return the used bytes as `usage` showed them when the storage was opened."""
        self.ensure_open()
        return StorageStats(
            nbytes=self._used,
            capacity_nbytes=self._settings.capacity_nbytes,
            counters=self._counters.snapshot(),
        )

    # --- parts ---------------------------------------------------------------------------------------

    @property
    def _counters(self) -> Counters:
        return self._own_counters

    def _read(
        self,
        space: KeySpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
        touched_ns: int | None,
        deadline: Deadline,
    ) -> list[int]:
        """Read pages.

        Return the verdict of the data plane on each, MISS for a page of a wrong size.
        """
        files = self._files_of(space)
        fitting = [index for index, page in enumerate(pages) if page.nbytes == files.nbytes]
        found = files.read(
            [hashes[index] for index in fitting],
            [pages[index] for index in fitting],
            touched_ns,
            self._settings.touch_interval_s,
            deadline,
        )
        self._note_errors(found)
        if late := found.count(native.LATE):
            self._counters.add("timeouts", late)
        verdicts = [native.MISS] * len(hashes)
        for index, verdict in zip(fitting, found, strict=True):
            verdicts[index] = verdict
        return verdicts

    def _faults_of(
        self, files: PageFiles, hashes: Sequence[str], *, sizes_only: bool = False
    ) -> Iterator[PageFault]:
        deadline = Deadline(self._settings.timeout_s)
        found, _, nbytes = files.stat(hashes, deadline)
        checked = found if sizes_only else files.check(hashes, None, deadline)
        if native.LATE in found or native.LATE in checked:
            deadline.check(f"file: looking at {counted(len(hashes), 'page')}")
        for page_hash, verdict, size, check in zip(hashes, found, nbytes, checked, strict=True):
            if verdict == native.HIT and size != files.file_nbytes:
                fact = f"its file is {size:,} bytes long instead of {files.file_nbytes:,}"
                yield PageFault(page_hash, "wrong_size", fact)
            elif check == native.WRONG:
                yield PageFault(page_hash, "corrupt", "its file does not end with its trailer")
            elif check < 0:
                yield PageFault(
                    page_hash, "unreadable", f"its file cannot be read: {os.strerror(-check)}"
                )

    def _is_there(self, files: PageFiles, page_hash: str) -> bool:
        (verdict,) = files.exists([page_hash], Deadline(self._settings.timeout_s))
        self._note_errors([verdict])
        return verdict == native.HIT

    def _note_errors(self, verdicts: Sequence[int]) -> None:
        for verdict in verdicts:
            if verdict < 0:
                self._note(OSError(-verdict, os.strerror(-verdict)))

    def _note(self, error: OSError) -> None:
        self._counters.add("io_errors")
        logger.debug("a page's file cannot be used: %s", error)


def _claims(widest: Capabilities, settings: FileSettings, *, direct: bool) -> Capabilities:
    """Return what a storage with these settings claims. `direct`: its files take O_DIRECT."""
    synced, capacity_nbytes = settings.durability == "power", settings.capacity_nbytes
    evicts = Limits.of(settings).evict
    return replace(
        widest,
        retention=min(widest.retention, Retention.UNTIL_PRESSURE if evicts else widest.retention),
        durability=min(widest.durability, Durability.POWER if synced else Durability.CRASH),
        alignment=DIRECT_ALIGNMENT if synced and direct else 1,
        parallelism=settings.parallelism,
        max_page_nbytes=None if capacity_nbytes is None else capacity_nbytes - TRAILER_NBYTES,
    )
