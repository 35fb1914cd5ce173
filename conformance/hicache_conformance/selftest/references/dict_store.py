"""The simplest right store, which keeps pages in a dict of this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hicache_conformance.selftest.references.plain import PlainStore
from hicache_storage.settings import ByteSize, Field, PositiveSeconds, SecretStr, Settings
from hicache_storage.storage import Capabilities, PageInfo, Retention, StorageStats

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from hicache_storage.keys import KeySpace


class DictSettings(Settings):
    """The config of `DictStore`."""

    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)
    """How many bytes the store holds. It refuses a set beyond them."""
    max_batch: int | None = Field(default=None, ge=1)
    max_page_nbytes: int | None = Field(default=None, ge=1)
    timeout_s: PositiveSeconds = 30.0
    """The time limit that every store has. Here nothing takes long."""
    password: SecretStr | None = None
    """A secret that is never used, and must never be shown."""


class Stored(NamedTuple):
    """A stored page with its name, so that listings don't depend on `_key`."""

    space: KeySpace
    page_hash: str
    data: bytes


class DictStore(PlainStore):
    """One dict under one lock. You can override every method of `PlainStore` alone.

    Four methods are its own, and are called under the lock: `_make_room` decides if a page may be
    stored; `_put` and `_drop` change the dict and the sum of its bytes together; `_drop_name` is the end
    of `remove_space`.
    """

    capabilities = Capabilities(retention=Retention.UNTIL_DELETED, enumerable=True)

    def __init__(self, settings: DictSettings) -> None:
        super().__init__()
        self._settings = settings
        self._lock = threading.Lock()
        self._pages: dict[Hashable, Stored] = {}
        self._spaces: dict[KeySpace, None] = {}
        self._nbytes = 0
        limits = {"max_batch": settings.max_batch, "max_page_nbytes": settings.max_page_nbytes}
        self.narrow(**{name: limit for name, limit in limits.items() if limit is not None})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(DictSettings.parse("dict", config))

    def stats(self) -> StorageStats:
        with self._lock:
            self.ensure_open()
            return StorageStats(
                pages=len(self._pages),
                nbytes=self._nbytes,
                capacity_nbytes=self._settings.capacity_nbytes,
                counters=self._counters.snapshot(),
            )

    def remove_space(self, space_id: str) -> int:
        with self._lock:
            self.ensure_open()
            found = [key for key, stored in self._pages.items() if stored.space.id == space_id]
            for key in found:
                self._drop(key)
            self._drop_name(space_id)
        return len(found)

    def close(self) -> None:
        with self._lock:
            super().close()
            self._pages.clear()
            self._spaces.clear()
            self._nbytes = 0

    def _read(self, space: KeySpace, page_hash: str) -> bytes | None:
        with self._lock:
            self.ensure_open()
            stored = self._pages.get(self._key(space, page_hash))
        return None if stored is None else stored.data

    def _write_whole(self, space: KeySpace, page_hash: str, data: bytes) -> bool:
        key = self._key(space, page_hash)
        with self._lock:
            self.ensure_open()
            if not self._make_room(key, len(data)):
                self._counters.add("refused")
                return False
            self._spaces[space] = None
            self._put(key, Stored(space, page_hash, data))
        return True

    def _removed(self, space: KeySpace, page_hash: str) -> bool:
        with self._lock:
            self.ensure_open()
            self._drop(self._key(space, page_hash))
        return True

    def _make_room(self, key: Hashable, nbytes: int) -> bool:
        capacity = self._settings.capacity_nbytes
        return capacity is None or self._nbytes_beside(key) + nbytes <= capacity

    def _nbytes_beside(self, key: Hashable) -> int:
        """Return how many bytes all other pages have."""
        stored = self._pages.get(key)
        return self._nbytes - (len(stored.data) if stored else 0)

    def _put(self, key: Hashable, stored: Stored) -> None:
        self._drop(key)
        self._pages[key] = stored
        self._nbytes += len(stored.data)

    def _drop(self, key: Hashable) -> None:
        self._nbytes = self._nbytes_beside(key)
        self._pages.pop(key, None)

    def _remember(self, space: KeySpace) -> bool:
        with self._lock:
            self.ensure_open()
            self._spaces[space] = None
        return True

    def _drop_name(self, space_id: str) -> None:
        """Forget the name of a key space."""
        self._spaces = {one: None for one in self._spaces if one.id != space_id}

    def _known_spaces(self) -> list[KeySpace]:
        with self._lock:
            self.ensure_open()
            return list(self._spaces)

    def _names(self, space: KeySpace) -> list[PageInfo]:
        with self._lock:
            self.ensure_open()
            pages = [stored for stored in self._pages.values() if stored.space == space]
        return [PageInfo(stored.page_hash, len(stored.data)) for stored in pages]
