from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space

from hicache_storage.backend_support.revocable import AtomicRevocable
from hicache_storage.errors import ConfigError, StorageClosed, UnsupportedOperation
from hicache_storage.page import Page

A, B, C = hash_of(1), hash_of(2), hash_of(3)


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    with MemoryStorage() as opened:
        yield opened


def test_a_list_shorter_than_the_other_is_refused(storage: MemoryStorage) -> None:
    with pytest.raises(ValueError, match="zip"):
        storage.batch_set(space(), [A, B], [page()])
    with pytest.raises(ValueError, match="zip"):
        storage.batch_get(space(), [A], [blank(), blank()])


def test_a_key_space_without_pages_is_not_kept(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A], [page()])
    storage.batch_delete(space(), [A])

    assert [] == list(storage.spaces())
    assert [True] == storage.batch_set(space(), [A], [page()])


def test_a_removed_key_space_is_gone_with_its_pages_and_its_bytes(storage: MemoryStorage) -> None:
    draft = space(pool="draft")
    storage.batch_set(space(), [A, B], [page(), page()])
    storage.batch_set(draft, [A], [page()])

    assert 2 == storage.remove_space(space().id)
    assert 0 == storage.remove_space(space().id)
    assert [draft] == list(storage.spaces())
    assert (1, 4096) == (storage.stats().pages, storage.stats().nbytes)
    assert [True] == storage.batch_set(space(), [A], [page()])


def test_a_given_page_is_kept_without_a_copy(storage: MemoryStorage) -> None:
    memory = bytearray(page(seed=1).tobytes())
    given, found = Page(memory), blank()
    given.given = True
    storage.batch_set(space(), [A], [given])
    memory[0] ^= 1

    assert [True] == storage.batch_get(space(), [A], [found])
    assert bytes(memory) == found.tobytes()


def test_a_given_page_that_can_be_revoked_is_copied(storage: MemoryStorage) -> None:
    memory = bytearray(page(seed=1).tobytes())
    given, found = Page(memory), blank()
    given.given, given.revocable = True, AtomicRevocable()
    storage.batch_set(space(), [A], [given])
    given.revocable.revoke()
    memory[0] ^= 1

    assert [True] == storage.batch_get(space(), [A], [found])
    assert page(seed=1).tobytes() == found.tobytes()


def test_beyond_its_capacity_a_page_is_refused_and_the_rest_stays() -> None:
    with MemoryStorage.from_config({"capacity_nbytes": 2 * 4096 + 1}) as storage:
        hashes = [A, B, C]

        assert [True, True, False] == storage.batch_set(space(), hashes, [page()] * 3)
        assert [True, True, False] == storage.batch_exists(space(), hashes)
        assert 1 == storage.stats().counters["refused_no_space"]


def test_stats_count_pages_and_bytes(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A, B], [page(), page()])
    storage.batch_set(space(pool="draft", page_nbytes=8), [A], [page(8)])
    stats = storage.stats()

    assert (3, 2 * 4096 + 8, None) == (stats.pages, stats.nbytes, stats.capacity_nbytes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"capacity_nbytes": 0}, "memory: capacity_nbytes: .*greater than 0"),
        ({"capacity_nbytes": "much"}, "memory: capacity_nbytes: "),
        ({"timeout_s": 0}, "memory: timeout_s: .*greater than 0"),
        ({"timeout": 1}, "memory: unknown field 'timeout'; did you mean 'timeout_s'"),
    ],
)
def test_a_wrong_config_is_refused_by_field(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryStorage.from_config(config)


def test_a_closed_storage_refuses_calls_and_holds_nothing(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A], [page()])
    storage.close()
    storage.close()

    assert {} == storage._spaces
    for refused in (storage.spaces, storage.stats):
        with pytest.raises(StorageClosed):
            refused()
    with pytest.raises(StorageClosed):
        storage.batch_exists(space(), [A])


def test_readers_see_whole_pages_while_writers_change_them(storage: MemoryStorage) -> None:
    """A hit has the bytes of one set, and the count of bytes is right at the end."""
    versions = {page(seed=seed).tobytes() for seed in range(4)}
    seen: Counter[str] = Counter()
    stop = threading.Event()

    def write(seed: int) -> None:
        for _ in range(200):
            storage.batch_set(space(), [A, B], [page(seed=seed)] * 2)
            storage.batch_delete(space(), [A])

    def read() -> None:
        target = blank()
        while True:
            last = stop.is_set()
            if storage.batch_get(space(), [B], [target])[0]:
                seen["whole" if target.tobytes() in versions else "torn"] += 1
            if last:
                return

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join(timeout=60)
    stop.set()
    reader.join(timeout=60)

    assert seen["whole"]
    assert not seen["torn"]
    assert 4096 * len(list(storage.scan(space()))) == storage.stats().nbytes


def test_a_capacity_below_one_page_is_refused_with_both_figures() -> None:
    with MemoryStorage.from_config({"capacity_nbytes": 4095}) as storage:
        with pytest.raises(
            UnsupportedOperation, match=r"is 4.00 KiB \(4,095 bytes\).*takes 4 KiB:"
        ):
            storage.open_space(space())
        assert 4095 == storage.capabilities.max_page_nbytes
        assert [] == list(storage.spaces())
