"""A store in memory that is always full: new pages evict the least recently used ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, Settings
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from hicache_storage.keys import KeySpace


class EvictingSettings(Settings):
    """The config of `EvictingStore`."""

    capacity_nbytes: ByteSize = Field(default=64 << 10, gt=0)
    """The bytes to hold, and the largest page."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit that every store has. Nothing here takes long."""


class EvictingStore(DictStore):
    """An LRU store. Gets and sets renew a page, exists does not. Evicted pages are gone as a whole.

    Its own methods: `_evict` removes one page; `_touch` makes a page the last to go.
    """

    capabilities = replace(DictStore.capabilities, retention=Retention.UNTIL_PRESSURE)

    def __init__(self, settings: EvictingSettings) -> None:
        capacity_nbytes = settings.capacity_nbytes
        super().__init__(
            DictSettings(capacity_nbytes=capacity_nbytes, max_page_nbytes=capacity_nbytes)
        )
        self._capacity_nbytes = capacity_nbytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(EvictingSettings.parse("evicting", config))

    def _contents(self, space: KeySpace, hashes: Sequence[str]) -> list[bytes | None]:
        for page_hash in hashes:
            self._touch(self._key(space, page_hash))
        return super()._contents(space, hashes)

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        if nbytes > self._capacity_nbytes:
            return False
        while self._nbytes_beside(key) + nbytes > self._capacity_nbytes:
            self._evict()
        return True

    def _evict(self) -> None:
        self._drop(next(iter(self._pages)))  # a dict is in the order of insertion
        self._counters.add("evictions")

    def _touch(self, key: Hashable) -> None:
        with self._lock:
            self.ensure_open()
            if key in self._pages:
                self._pages[key] = self._pages.pop(key)
