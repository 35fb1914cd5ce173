"""The limits of the machine: system calls on plain files, and nothing else."""
# ruff: noqa: PTH104, PTH108 - the calls themselves are what is measured

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import TYPE_CHECKING

from _store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _store import Memory

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC


class PlainFiles(Store):
    """Files in one directory. Set: open, pwritev, close, rename. Get: open, preadv, close."""

    name = "write+rename"

    def __init__(self, directory: Path, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)
        self.directory = str(directory)
        self.temporary = f"{directory}/temporary"
        self.paths: list[str] = []
        self.reads = [[view] for view in destination.views]
        self.writes = [[view] for view in source.views]

    def prepare_set(self, hashes: Sequence[str]) -> None:
        super().prepare_set(hashes)
        self.paths = [f"{self.directory}/{page_hash}" for page_hash in hashes]

    def set(self) -> None:
        temporary = self.temporary
        for path, buffers in zip(self.paths, self.writes, strict=True):
            descriptor = os.open(temporary, _CREATE, 0o644)
            os.pwritev(descriptor, buffers, 0)
            os.close(descriptor)
            os.rename(temporary, path)

    def prepare_get(self, hashes: Sequence[str]) -> None:
        super().prepare_get(hashes)
        self.paths = [f"{self.directory}/{page_hash}" for page_hash in hashes]

    def get(self) -> None:
        for path, buffers in zip(self.paths, self.reads, strict=True):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            os.preadv(descriptor, buffers, 0)
            os.close(descriptor)


class OpenedFiles(PlainFiles):
    """`PlainFiles` under the name that tables of gets use."""

    name = "open+preadv+close"


class SyncedFiles(PlainFiles):
    """`PlainFiles`, but each file is synced before its rename, and the directory after all of them."""

    name = "write+fsync+rename"

    def set(self) -> None:
        temporary = self.temporary
        for path, buffers in zip(self.paths, self.writes, strict=True):
            descriptor = os.open(temporary, _CREATE, 0o644)
            os.pwritev(descriptor, buffers, 0)
            os.fsync(descriptor)
            os.close(descriptor)
            os.rename(temporary, path)
        descriptor = os.open(self.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class OpenFiles(PlainFiles):
    """A store that reads files by preadv on open descriptors, on one or more threads."""

    def __init__(
        self,
        directory: Path,
        source: Memory,
        destination: Memory,
        *,
        threads: int = 1,
        direct: bool = False,
    ) -> None:
        super().__init__(directory, source, destination)
        self.name = "preadv, O_DIRECT" if direct else "preadv"
        self.name += f", {threads} threads" if threads > 1 else ""
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._descriptors: list[int] = []
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads)

    def get(self) -> None:
        if not self._descriptors:  # this happens in the warm-up round
            self._descriptors = [os.open(path, self._flags) for path in self.paths]
        if self._threads == 1:
            self._read(slice(None))
            return
        step = -(-len(self.paths) // self._threads)
        parts = [slice(start, start + step) for start in range(0, len(self.paths), step)]
        for _ in self._executor.map(self._read, parts):
            pass

    def close(self) -> None:
        self._executor.shutdown()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _read(self, part: slice) -> None:
        for descriptor, buffers in zip(self._descriptors[part], self.reads[part], strict=True):
            os.preadv(descriptor, buffers, 0)


class Memcpy(Store):
    """Plain copies from memory to memory, without files."""

    name = "memcpy"

    def __init__(self, _: Path, source: Memory, destination: Memory) -> None:
        super().__init__(source, destination)

    def set(self) -> None:
        for target, source in zip(self.destination.views, self.source.views, strict=True):
            target[:] = source

    def get(self) -> None:
        self.set()


class UnlinkedRing(PlainFiles):
    """A full store that unlinks the oldest file and creates a new one."""

    name = "unlink+write+rename"

    def __init__(
        self, directory: Path, source: Memory, destination: Memory, *, capacity_pages: int
    ) -> None:
        super().__init__(directory, source, destination)
        self._slots: list[str | None] = [None] * capacity_pages
        self._turns = cycle(range(capacity_pages))

    def set(self) -> None:
        for path, buffers in zip(self.paths, self.writes, strict=True):
            slot = next(self._turns)
            victim = self._slots[slot]
            if victim is not None:
                self.evict(victim)
            self._slots[slot] = path
            descriptor = os.open(self.temporary, _CREATE, 0o644)
            os.pwritev(descriptor, buffers, 0)
            os.close(descriptor)
            os.rename(self.temporary, path)

    def evict(self, victim: str) -> None:
        os.unlink(victim)


class RecycledRing(UnlinkedRing):
    """A full store that renames the oldest file, overwrites it in place, and renames it again."""

    name = "rename+overwrite+rename"

    def evict(self, victim: str) -> None:
        os.rename(victim, self.temporary)
