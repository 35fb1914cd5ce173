"""Compositions for tests, in directories and in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hicache_backends.memory import MemoryStorage
from hicache_conformance import StorageConformance
from pages import blank, hash_of, page, space

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage, PageInfo

SPACE = space()
"""The key space of the pages of `save` and `load`."""


def file_member(name: str, path: Path, **config: Any) -> dict[str, Any]:
    """Return a `file` store as a member of a composition."""
    return {"name": name, "backend": "file", "config": {"path": str(path), **config}}


def memory_member(name: str, **config: Any) -> dict[str, Any]:
    """Return a `memory` store as a member of a composition."""
    return {"name": name, "backend": "memory", "config": config}


def save(storage: HiCacheStorage, count: int) -> list[bool]:
    """Store `count` pages. Return the answers."""
    storage.open_space(SPACE)
    pages = [page(seed=number) for number in range(count)]
    return storage.batch_set(SPACE, [hash_of(number) for number in range(count)], pages)


def load(storage: HiCacheStorage, count: int) -> list[bool]:
    """Read the pages that `save` stores. Check that each hit has its own bytes."""
    targets = [blank() for _ in range(count)]
    hits = storage.batch_get(SPACE, [hash_of(number) for number in range(count)], targets)
    for number, (hit, target) in enumerate(zip(hits, targets, strict=True)):
        assert not hit or target.tobytes() == page(seed=number).tobytes()
    return hits


def page_file_of(root: Path, space: KeySpace, page_hash: str) -> Path:
    """Return the file in which `file` keeps a page."""
    return root / "spaces" / space.id / page_hash[:2] / page_hash


def read_file(roots: list[Path], space: KeySpace, page_hash: str) -> bytes | None:
    """Return the bytes of a page in the first root that has it."""
    found = [page_file_of(root, space, page_hash) for root in roots]
    return next((path.read_bytes() for path in found if path.is_file()), None)


def write_files(roots: list[Path], space: KeySpace, page_hash: str, data: bytes | None) -> None:
    """Replace a page in each root that has it, or remove it."""
    for path in (page_file_of(root, space, page_hash) for root in roots):
        if data is None:
            path.unlink(missing_ok=True)
        elif path.is_file():
            path.write_bytes(data)


class Controlled(MemoryStorage):
    """A store in memory that a test can stop, hang, fill or damage."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow(parallelism=1)
        self.is_down = False
        self.is_down_after = False
        """Calls take effect, and then fail."""
        self.is_full = False
        self.calls: list[str] = []
        """The names of the calls that have begun."""
        self.gates: dict[str, threading.Event] = {}
        """Calls that wait for an event before they do anything, by name."""

    def hang(self, *calls: str) -> None:
        """Let these calls wait until `go_on`."""
        self.gates.update({call: threading.Event() for call in calls})

    def go_on(self) -> None:
        """Let the waiting calls go on."""
        gates, self.gates = self.gates, {}
        for gate in gates.values():
            gate.set()

    def damage(self, space: KeySpace, page_hash: str) -> None:
        """Flip a bit of the last byte of a page."""
        self._spaces[space][page_hash][-1] ^= 1

    def has(self, space: KeySpace, page_hash: str) -> bool:
        """Return True if the page is there, whatever state the store is in."""
        return page_hash in self._spaces.get(space, {})

    def _begin(self, call: str) -> None:
        self.calls.append(call)
        gate = self.gates.get(call)
        if gate is not None:
            assert gate.wait(30), f"{call} was not let go on"
        if self.is_down:
            raise StorageUnavailable("connection refused")

    def open_space(self, space: KeySpace) -> None:
        self._begin("open")
        super().open_space(space)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._begin("exists")
        return super().batch_exists(space, hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin("get")
        return super().batch_get(space, hashes, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin("set")
        if self.is_full:
            return [False] * len(hashes)
        stored = super().batch_set(space, hashes, pages)
        if self.is_down_after:
            raise StorageTimeout("no answer")
        return stored

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._begin("delete")
        return super().batch_delete(space, hashes)

    def spaces(self) -> Iterator[KeySpace]:
        self._begin("spaces")
        return super().spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self._begin("scan")
        return super().scan(space)


class FileMembers(StorageConformance):
    """The kit on a composition of `file` stores, with back doors to their directories."""

    roots: list[Path]

    def peek(self, space: KeySpace, page_hash: str) -> bytes | None:
        return read_file(self.roots, space, page_hash)

    def tamper(self, space: KeySpace, page_hash: str, data: bytes | None) -> None:
        write_files(self.roots, space, page_hash, data)
