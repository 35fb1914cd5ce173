"""A store in memory that is always full: new pages evict the least recently used ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import xxhash

from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings
from hicache_storage.storage import PageTimes, Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hicache_conformance.selftest.references.dict_store import Stored
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class EvictingSettings(Settings):
    """The config of `EvictingStore`."""

    capacity_nbytes: ByteSize = Field(default=64 << 10, gt=0)
    """How many bytes the store holds, and the largest page."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit that every store has. Here nothing takes long."""


class EvictingStore(DictStore):
    """An LRU store. Gets and sets renew a page, lookups do not. An evicted page is gone as a whole.

    It returns the times of its pages, and their digests. Its own methods: `_evict` removes one
    page; `_touch` makes a page the last to go; `_times` returns the times of one page; `_digest`
    hashes one page.
    """

    capabilities = replace(DictStore.capabilities, retention=Retention.UNTIL_PRESSURE)

    def __init__(self, settings: EvictingSettings) -> None:
        capacity_nbytes = settings.capacity_nbytes
        super().__init__(
            DictSettings(capacity_nbytes=capacity_nbytes, max_page_nbytes=capacity_nbytes)
        )
        self._capacity_nbytes = capacity_nbytes
        self._written_s: dict[Hashable, float] = {}
        self._used_s: dict[Hashable, float] = {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EvictingSettings.parse("evicting", config))

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        for page_hash in hashes:
            self._touch(self._key(space, page_hash))
        return super()._contents(space, hashes)

    def _filled(self, page: Page, data: bytes | None) -> bool:
        is_filled = super()._filled(page, data)
        if is_filled and data is not None and page.digest_skip is not None:
            page.digest = self._digest(data, page.digest_skip)
        return is_filled

    def _digest(self, data: bytes, skip: int) -> int:
        return xxhash.xxh3_64_intdigest(data[skip:])

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        with self._lock:
            self.ensure_open()
            return [self._times(self._key(space, page_hash)) for page_hash in hashes]

    def _times(self, key: Hashable) -> PageTimes:
        if key not in self._pages:
            return PageTimes()
        return PageTimes(written_at_s=self._written_s[key], used_at_s=self._used_s[key])

    def _put(self, key: Hashable, stored: Stored) -> None:
        super()._put(key, stored)
        self._written_s[key] = self._used_s[key] = time.time()

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        if nbytes > self._capacity_nbytes:
            return False
        while self._nbytes_beside(key) + nbytes > self._capacity_nbytes:
            self._evict()
        return True

    def _evict(self) -> None:
        self._drop(next(iter(self._pages)))  # a dict keeps the order of insertion
        self._counters.add("evictions")

    def _touch(self, key: Hashable) -> None:
        with self._lock:
            self.ensure_open()
            if key in self._pages:
                self._pages[key] = self._pages.pop(key)
                self._used_s[key] = time.time()
