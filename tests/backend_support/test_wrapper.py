from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller

import pytest
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space
from processes import in_a_fork

from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.errors import StorageClosed, UnsupportedOperation
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import Capabilities, Durability, HiCacheStorage, StorageStats

SPACE = space()
HASHES = [hash_of(number) for number in range(4)]


def pages() -> list[Page]:
    return [page(seed=number) for number in range(4)]


class Hashing(MemoryStorage):
    """A storage that sets the digest of each page that it fills."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        pages[0].digest = 1
        return super().batch_get(space, hashes, pages)


def test_a_page_that_went_through_it_has_no_digest() -> None:
    """A subclass may change the page, but the page store would trust the digest of the old bytes."""
    target = blank()
    with WrapperStorage(Hashing()) as storage:
        storage.batch_get(SPACE, HASHES[:1], [target])

    assert target.digest is None


def test_calls_reach_the_inner_storage() -> None:
    inner = MemoryStorage()
    with WrapperStorage(inner) as storage:
        storage.open_space(SPACE)
        assert [True] * 4 == storage.batch_set(SPACE, HASHES, pages())

        got = [blank() for _ in HASHES]
        assert [True] * 4 == storage.batch_get(SPACE, HASHES, got)
        assert [True] == inner.batch_exists(SPACE, HASHES[:1])
        assert [True] == storage.batch_delete(SPACE, HASHES[:1])
        assert [False, True] == storage.batch_exists(SPACE, HASHES[:2])
        assert [SPACE] == list(storage.spaces())
        assert set(HASHES[1:]) == {info.page_hash for info in storage.scan(SPACE)}
        assert inner.stats() == storage.stats()
        assert storage.clear(SPACE) == 3
        assert storage.remove_space(SPACE.id) == 0
        assert [] == list(inner.spaces())

    assert [each.tobytes() for each in pages()] == [each.tobytes() for each in got]


def test_every_method_of_the_interface_is_passed_on() -> None:
    interface = {name for name, value in vars(HiCacheStorage).items() if callable(value)}
    public = {name for name in interface if not name.startswith("_")}

    assert {"narrow"} == public - set(vars(WrapperStorage))  # a wrapper narrows its own claims


@pytest.mark.parametrize(
    "call",
    [
        methodcaller("register_buffer", bytearray(8)),
        methodcaller("unregister_buffer", bytearray(8)),
        methodcaller("ensure_open"),
        methodcaller("stats"),
    ],
)
def test_the_errors_of_the_inner_storage_are_passed_on(
    call: Callable[[HiCacheStorage], object],
) -> None:
    inner = MemoryStorage()
    storage = WrapperStorage(inner)
    inner.close()

    with pytest.raises(StorageClosed):
        call(storage)


def test_the_capabilities_are_those_of_the_inner_storage() -> None:
    inner = MemoryStorage()
    inner.narrow(parallelism=3)

    assert inner.capabilities == WrapperStorage(inner).capabilities != Capabilities()


def test_a_wrapper_may_claim_less_than_its_inner_storage_and_not_more() -> None:
    storage = WrapperStorage(MemoryStorage())

    storage.narrow(enumerable=False)

    assert not storage.capabilities.enumerable
    assert storage.inner.capabilities.enumerable
    with pytest.raises(ValueError, match="durability"):
        storage.narrow(durability=Durability.POWER)


def test_closing_the_wrapper_closes_the_inner_storage() -> None:
    inner = MemoryStorage()
    WrapperStorage(inner).close()

    with pytest.raises(StorageClosed):
        inner.stats()


def test_a_wrapper_is_usable_in_a_forked_child_where_the_inner_storage_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def works(storage: HiCacheStorage) -> bool:
        try:
            storage.ensure_open()
        except StorageClosed:
            return False
        return storage.batch_exists(SPACE, HASHES[:1]) == [False]

    refusing = WrapperStorage(MemoryStorage())
    monkeypatch.setattr(MemoryStorage, "usable_after_fork", True)
    usable = WrapperStorage(MemoryStorage())

    assert in_a_fork(lambda: [works(refusing), works(usable)]) == [False, True]


def test_a_subclass_changes_the_calls_that_it_overrides() -> None:
    class Full(WrapperStorage):
        def stats(self) -> StorageStats:
            return StorageStats(pages=7)

    storage = Full(MemoryStorage())

    assert storage.stats().pages == 7
    assert [True] * 4 == storage.batch_set(SPACE, HASHES, pages())


def test_it_is_not_opened_by_a_config() -> None:
    with pytest.raises(UnsupportedOperation, match="construct it around"):
        WrapperStorage.from_config({})
