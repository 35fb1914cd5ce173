"""`memory` as a HiCacheStorage: one dict per key space, one lock, no eviction."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.memory.settings import MemorySettings
from hicache_storage import native
from hicache_storage.backend_support.capacity import page_over_capacity
from hicache_storage.backend_support.copies import new_memory
from hicache_storage.backend_support.revocable import states_of
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import (
    Capabilities,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class MemoryStorage(HiCacheStorage):
    """A storage of pages in this process's memory, until they are deleted. Thread-safe."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        enumerable=True,
        parallelism=2,
        revocable=True,
        keeps_given=True,
    )

    def __init__(self, settings: MemorySettings | None = None) -> None:
        self._settings = settings or MemorySettings()
        self._lock = threading.Lock()
        self._spaces: dict[KeySpace, dict[str, memoryview]] = {}
        """The key spaces that contain pages.

        Empty key spaces are not kept, because clients could open any number of them.
        """
        self._nbytes = 0
        self._refused = 0
        self.narrow(max_page_nbytes=self._settings.capacity_nbytes)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(MemorySettings.parse("memory", config))

    def open_space(self, space: KeySpace) -> None:
        self.ensure_open()
        capacity = self._settings.capacity_nbytes
        if capacity is not None and space.stored_nbytes > capacity:
            raise UnsupportedOperation(
                page_over_capacity("memory", space, space.stored_nbytes, capacity)
            )
        super().open_space(space)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        stored = self._spaces.get(space, {})
        return [page_hash in stored for page_hash in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        stored = self._spaces.get(space, {})
        found = {
            index: data
            for index, (page_hash, page) in enumerate(zip(hashes, pages, strict=True))
            if (data := stored.get(page_hash)) is not None and len(data) == page.nbytes
        }
        targets = [pages[index] for index in found]
        skip = pages[0].digest_skip if pages else None
        verdicts, digests = native.copy_revocable(
            [page.segments for page in targets],
            [(data,) for data in found.values()],
            states_of(targets),
            -1 if skip is None else skip,
            True,
        )
        answers = [False] * len(hashes)
        for index, verdict, digest in zip(found, verdicts, digests, strict=True):
            answers[index] = verdict == native.HIT
            pages[index].digest = None if skip is None else digest
        return answers

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        copied = [page for page in pages if not _is_kept(page)]
        copies = [new_memory(page.nbytes) for page in copied]
        verdicts, _ = native.copy_revocable(
            [(copy,) for copy in copies],
            [page.segments for page in copied],
            states_of(copied),
            -1,
            True,
        )
        made = zip(copies, verdicts, strict=True)
        answers: list[bool] = []
        for page_hash, page in zip(hashes, pages, strict=True):
            memory, verdict = (page.segments[0], native.HIT) if _is_kept(page) else next(made)
            answers.append(verdict == native.HIT and self._set(space, page_hash, memory))
        return answers

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        with self._lock:
            stored = self._spaces.get(space, {})
            self._nbytes -= sum(len(stored.pop(page_hash, b"")) for page_hash in hashes)
            if not stored:
                self._spaces.pop(space, None)
        return [True] * len(hashes)

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        with self._lock:
            return iter(list(self._spaces))

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        with self._lock:
            stored = list(self._spaces.get(space, {}).items())
        return iter([PageInfo(page_hash, len(data)) for page_hash, data in stored])

    def remove_space(self, space_id: str) -> int:
        self.ensure_open()
        with self._lock:
            found = [space for space in self._spaces if space.id == space_id]
            removed = [data for space in found for data in self._spaces.pop(space).values()]
            self._nbytes -= sum(map(len, removed))
        return len(removed)

    def stats(self) -> StorageStats:
        self.ensure_open()
        with self._lock:
            return StorageStats(
                pages=sum(map(len, self._spaces.values())),
                nbytes=self._nbytes,
                capacity_nbytes=self._settings.capacity_nbytes,
                counters={"refused_no_space": self._refused},
            )

    def close(self) -> None:
        super().close()
        with self._lock:
            self._spaces.clear()

    def _set(self, space: KeySpace, page_hash: str, data: memoryview) -> bool:
        with self._lock:
            stored = self._spaces.get(space, {})
            nbytes = self._nbytes + len(data) - len(stored.get(page_hash, b""))
            capacity = self._settings.capacity_nbytes
            if capacity is not None and nbytes > capacity:
                self._refused += 1
                return False
            self._spaces.setdefault(space, stored)[page_hash] = data
            self._nbytes = nbytes
            return True


def _is_kept(page: Page) -> bool:
    """Return True if the page's memory is ours. Memory that can be revoked is copied."""
    return page.given and page.revocable is None
