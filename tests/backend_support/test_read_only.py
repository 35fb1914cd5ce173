from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space

from hicache_storage.backend_support.read_only import ReadOnlyStorage
from hicache_storage.errors import ConfigError, StorageClosed, UnsupportedOperation
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage

SPACE = space()
HASHES = [hash_of(number) for number in range(2)]

CHANGES: dict[str, Callable[[HiCacheStorage], object]] = {
    "set": lambda storage: storage.batch_set(SPACE, HASHES[1:], [page(seed=1)]),
    "delete": lambda storage: storage.batch_delete(SPACE, HASHES[:1]),
    "clear": lambda storage: storage.clear(SPACE),
    "remove_space": lambda storage: storage.remove_space(SPACE.id),
}


@pytest.fixture
def inner() -> MemoryStorage:
    storage = MemoryStorage()
    storage.batch_set(SPACE, HASHES[:1], [page(seed=0)])
    return storage


@pytest.mark.parametrize("name", CHANGES)
def test_a_call_that_would_change_the_store_is_refused_by_name(
    inner: MemoryStorage, name: str
) -> None:
    with pytest.raises(
        UnsupportedOperation, match=f"{name}: this MemoryStorage was opened read-only"
    ):
        CHANGES[name](ReadOnlyStorage(inner))

    assert [True, False] == inner.batch_exists(SPACE, HASHES)


@pytest.mark.parametrize("name", CHANGES)
def test_after_close_it_says_closed(inner: MemoryStorage, name: str) -> None:
    storage = ReadOnlyStorage(inner)
    storage.close()

    with pytest.raises(StorageClosed):
        CHANGES[name](storage)


def test_pages_are_read_and_a_key_space_is_not_made(inner: MemoryStorage) -> None:
    other, got = space(model="other"), blank()
    storage = ReadOnlyStorage(inner)
    storage.open_space(other)

    assert [True] == storage.batch_get(SPACE, HASHES[:1], [got])
    assert page(seed=0).tobytes() == got.tobytes()
    assert [SPACE] == list(storage.spaces())


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no store at"):
        open_storage("file", {"path": str(tmp_path / "kv")}, read_only=True)

    assert not list(tmp_path.iterdir())
