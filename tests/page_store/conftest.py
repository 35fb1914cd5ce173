"""Page stores over a storage in memory with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from framed import DRAFT, TARGET
from stores import HookedStorage

from hicache_storage.page_store import PageStore, PageStoreSettings


@pytest.fixture
def storage() -> HookedStorage:
    return HookedStorage()


@pytest.fixture
def open_store(storage: HookedStorage) -> Iterator[Callable[..., PageStore]]:
    opened: list[PageStore] = []

    def open_it(on: HookedStorage = storage, **settings: Any) -> PageStore:
        store = PageStore(on, PageStoreSettings(**settings))
        opened.append(store)
        for known in (TARGET, DRAFT):
            store.open_space(known)
        return store

    yield open_it
    for store in opened:
        store.close()
