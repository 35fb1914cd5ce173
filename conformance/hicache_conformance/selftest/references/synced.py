"""Stores that sync each set before it returns: one behind a server, and one of files."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import Operation
from hicache_conformance.tools.observation.synced_files import SyncedFiles
from hicache_storage.storage import Durability

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_storage.keys import KeySpace


class Synced(WireStore):
    """A store whose pages survive a power cut. `_sync` makes the server write a key space to disk."""

    capabilities = replace(WireStore.capabilities, durability=Durability.POWER)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        verdicts = super()._store(space, hashes, contents)
        self._sync(space)
        return verdicts

    def _sync(self, space: KeySpace) -> None:
        self._about(Operation.SYNC, space)


class SyncedShelf(Shelf):
    """A store of files whose pages survive a power cut.

    `_sync_file` syncs a file that was written, and `_sync_names` a directory after a batch of names.
    """

    capabilities = replace(Shelf.capabilities, durability=Durability.POWER)

    def _prepare(self) -> None:
        SyncedFiles(self._root).watch()
        super()._prepare()

    def _write_file(self, path: Path, data: bytes) -> None:
        super()._write_file(path, data)
        self._sync_file(path)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        stored = super()._store(space, hashes, contents)
        try:
            if any(stored):
                self._sync_names(self._folder(space))
                self._sync_names(self._root)
        except OSError:
            self._counters.add("refused")
            self._remove(space, hashes)
            return [False] * len(hashes)
        return stored

    def _sync_file(self, path: Path) -> None:
        _sync(path)

    def _sync_names(self, directory: Path) -> None:
        _sync(directory)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
