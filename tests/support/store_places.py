"""A place for each of the reference stores, for tests."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_conformance.selftest.references.blobs import Blobs
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.evicting import EvictingStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.first_wins import FirstWins
from hicache_conformance.selftest.references.slow import SlowStore
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireServer, WireStore
from pages import blank, space

from hicache_storage.storage import HiCacheStorage

STORES: tuple[type[HiCacheStorage], ...] = (
    DictStore,
    FirstWins,
    Blobs,
    EvictingStore,
    SlowStore,
    Shelf,
    SqliteStore,
    WireStore,
)
SHARED = tuple(one for one in STORES if one.capabilities.shared)


@dataclass
class Place:
    """The class, config and directory of one store. Two handles see the same pages if it is shared."""

    storage_class: type[HiCacheStorage]
    config: dict[str, Any]
    path: Path

    def open(self, **changes: Any) -> HiCacheStorage:
        return self.storage_class.from_config({**self.config, **changes})


@contextmanager
def place_of(storage_class: type[HiCacheStorage], path: Path) -> Generator[Place, None, None]:
    """Yield a fresh place, under `path` if the store has files, with a server if it needs one."""
    with WireServer() as server:
        configs: dict[type[HiCacheStorage], dict[str, Any]] = {
            Shelf: {"path": str(path)},
            SqliteStore: {"path": str(path / "pages.sqlite")},
            WireStore: {"url": server.url},
        }
        yield Place(storage_class, configs.get(storage_class, {}), path)


def read(store: HiCacheStorage, page_hash: str) -> bytes | None:
    """Return the bytes of a page of `space()`, or None for a miss."""
    target = blank()
    return target.tobytes() if store.batch_get(space(), [page_hash], [target])[0] else None
