"""A store of files with a capacity. It evicts the oldest files first."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_storage.settings import ByteSize, Field
from hicache_storage.storage import PageTimes, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace


class EvictingShelfSettings(ShelfSettings):
    """The config of `EvictingShelf`."""

    capacity_nbytes: ByteSize = Field(default=4 << 20, gt=0)
    """How many bytes all pages have together, and the largest page."""


class EvictingShelf(Shelf):
    """An LRU store of files. A get sets the modification time of a file to the time of this use.

    If the capacity was lowered, opening the store evicts what no longer has room. Its own methods:
    `_evict` makes room, `_oldest_first` is the order of eviction, `_note_use` renews a file.
    """

    capabilities = replace(Shelf.capabilities, retention=Retention.UNTIL_PRESSURE)

    def __init__(self, settings: EvictingShelfSettings) -> None:
        self._capacity_nbytes = settings.capacity_nbytes
        super().__init__(settings)
        self.narrow(max_page_nbytes=settings.capacity_nbytes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EvictingShelfSettings.parse("evicting shelf", config))

    def _prepare(self) -> None:
        super()._prepare()
        self._evict(0)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        times = super().page_times(space, hashes)
        return [PageTimes(used_at_s=one.written_at_s) for one in times]

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        data = super()._read(space, page_hash)
        if data is not None and not self._reads_only:
            self._note_use(self._path(space, page_hash))
        return data

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        if len(data) > self._capacity_nbytes:
            return False
        self._evict(len(data))
        return super()._write_whole(space, page_hash, data)

    def _note_use(self, path: Path) -> None:
        try:
            os.utime(path)
        except FileNotFoundError:
            return  # the file was evicted

    def _oldest_first(self, found: list[tuple[int, int, Path]]) -> list[tuple[int, int, Path]]:
        return sorted(found)

    def _evict(self, nbytes: int) -> None:
        """Remove the oldest files until `nbytes` more have room."""
        found: list[tuple[int, int, Path]] = []
        for space in self._known_spaces():
            for info in self._names(space):
                path = self._path(space, info.page_hash)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                found.append((status.st_mtime_ns, status.st_size, path))
        used = sum(size for _, size, _ in found)
        for _, size, path in self._oldest_first(found):
            if used + nbytes <= self._capacity_nbytes:
                return
            path.unlink(missing_ok=True)
            used -= size
