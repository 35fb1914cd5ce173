from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of, page, space

from hicache_storage.errors import ConfigError, StorageClosed, UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

A, B, C = hash_of(1), hash_of(2), hash_of(3)


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    with MemoryStorage() as opened:
        yield opened


def test_a_fresh_key_space_is_empty(storage: MemoryStorage) -> None:
    storage.open_space(space())

    assert [False, False] == storage.batch_exists(space(), [A, B])
    assert [] == list(storage.scan(space()))


def test_what_was_set_is_read_back(storage: MemoryStorage) -> None:
    target = blank()

    assert [True] == storage.batch_set(space(), [A], [page(seed=1)])
    assert [True] == storage.batch_get(space(), [A], [target])
    assert page(seed=1).tobytes() == target.tobytes()


def test_a_page_is_read_back_in_any_segmentation(storage: MemoryStorage) -> None:
    target = Page(bytearray(1), bytearray(4000), bytearray(95))
    storage.batch_set(space(), [A], [Page(bytearray(4000), bytearray(b"x" * 96))])

    assert [True] == storage.batch_get(space(), [A], [target])
    assert bytes(4000) + b"x" * 96 == target.tobytes()


def test_a_miss_leaves_the_page_alone(storage: MemoryStorage) -> None:
    target = blank()

    assert [False] == storage.batch_get(space(), [A], [target])
    assert blank().tobytes() == target.tobytes()


def test_pages_are_copied_not_kept(storage: MemoryStorage) -> None:
    source, target = page(), blank()
    storage.batch_set(space(), [A], [source])
    source.copy_from(bytes(4096))
    storage.batch_get(space(), [A], [target])
    target.copy_from(bytes(4096))
    storage.batch_get(space(), [A], [target])

    assert page().tobytes() == target.tobytes()


def test_a_second_set_wins(storage: MemoryStorage) -> None:
    target = blank()
    storage.batch_set(space(), [A], [page(seed=1)])

    assert [True] == storage.batch_set(space(), [A], [page(seed=2)])
    storage.batch_get(space(), [A], [target])
    assert page(seed=2).tobytes() == target.tobytes()
    assert 4096 == storage.stats().nbytes


def test_a_deleted_page_is_gone_and_can_be_set_again(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A], [page()])

    assert [True, True] == storage.batch_delete(space(), [A, B])
    assert [False] == storage.batch_exists(space(), [A])
    assert [True] == storage.batch_set(space(), [A], [page()])
    assert [True] == storage.batch_exists(space(), [A])


def test_deleting_from_an_unknown_key_space_is_true(storage: MemoryStorage) -> None:
    assert [True] == storage.batch_delete(space(), [A])


def test_each_item_has_its_own_verdict(storage: MemoryStorage) -> None:
    targets = [blank(), blank(), blank()]
    storage.batch_set(space(), [A, C], [page(seed=1), page(seed=3)])

    assert [True, False, True] == storage.batch_get(space(), [A, B, C], targets)
    assert [page(seed=1).tobytes(), blank().tobytes(), page(seed=3).tobytes()] == [
        target.tobytes() for target in targets
    ]


def test_duplicates_are_each_answered(storage: MemoryStorage) -> None:
    assert [True, True] == storage.batch_set(space(), [A, A], [page(), page()])
    assert [True, False, True] == storage.batch_exists(space(), [A, B, A])
    assert [True, True] == storage.batch_delete(space(), [A, A])
    assert 0 == storage.stats().nbytes


def test_empty_batches_give_empty_lists(storage: MemoryStorage) -> None:
    assert [] == storage.batch_exists(space(), [])
    assert [] == storage.batch_get(space(), [], [])
    assert [] == storage.batch_set(space(), [], [])
    assert [] == storage.batch_delete(space(), [])


def test_key_spaces_do_not_see_each_other(storage: MemoryStorage) -> None:
    draft, target = space(pool="draft", page_nbytes=8), Page(bytearray(8))
    storage.batch_set(space(), [A], [page()])
    storage.batch_set(draft, [A], [Page(b"12345678")])

    assert [True] == storage.batch_get(draft, [A], [target])
    assert b"12345678" == target.tobytes()
    assert 1 == storage.clear(draft)
    assert [True] == storage.batch_exists(space(), [A])


def test_a_page_of_another_size_is_a_miss(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A], [Page(b"short")])

    assert [False] == storage.batch_get(space(), [A], [blank()])


def test_a_list_shorter_than_the_other_is_refused(storage: MemoryStorage) -> None:
    with pytest.raises(ValueError, match="zip"):
        storage.batch_set(space(), [A, B], [page()])
    with pytest.raises(ValueError, match="zip"):
        storage.batch_get(space(), [A], [blank(), blank()])


def test_scan_and_spaces_list_what_is_there(storage: MemoryStorage) -> None:
    draft = space(pool="draft")
    storage.open_space(draft)
    storage.batch_set(space(), [A, B], [page(), page()])

    assert [space()] == list(storage.spaces())
    assert {PageInfo(A, 4096), PageInfo(B, 4096)} == set(storage.scan(space()))
    assert [] == list(storage.scan(draft))


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


def test_a_scan_works_beside_writers(storage: MemoryStorage) -> None:
    storage.batch_set(space(), [A, B], [page(), page()])
    scanned = storage.scan(space())
    storage.batch_delete(space(), [A, B])

    assert {A, B} == {info.page_hash for info in scanned}


def test_beyond_its_capacity_a_page_is_refused_and_the_rest_stays() -> None:
    with MemoryStorage.from_config({"capacity_nbytes": 2 * 4096 + 1}) as storage:
        hashes = [A, B, C]

        assert [True, True, False] == storage.batch_set(space(), hashes, [page()] * 3)
        assert [True, True, False] == storage.batch_exists(space(), hashes)
        assert 1 == storage.stats().counters["refused_no_space"]


def test_freed_capacity_is_used() -> None:
    with MemoryStorage.from_config({"capacity_nbytes": 4096}) as storage:
        storage.batch_set(space(), [A], [page()])
        storage.batch_delete(space(), [A])

        assert [True] == storage.batch_set(space(), [B], [page()])


def test_a_present_page_is_set_again_in_a_full_store() -> None:
    with MemoryStorage.from_config({"capacity_nbytes": 4096}) as storage:
        storage.batch_set(space(), [A], [page()])

        assert [True] == storage.batch_set(space(), [A], [page()])


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
        with pytest.raises(UnsupportedOperation, match=r"capacity_nbytes is 4095.*4096 bytes"):
            storage.open_space(space())
        assert 4095 == storage.capabilities.max_page_nbytes
        assert [] == list(storage.spaces())
