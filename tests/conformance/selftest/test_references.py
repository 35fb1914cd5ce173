"""What is true of every reference store. `test_stores_together.py` has what takes several callers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.tools.processes.resources import ProcessResources, remaining_after
from pages import blank, hash_of, page, space
from store_places import STORES, Place, place_of, read

from hicache_storage.errors import ConfigError, StorageClosed, UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache_storage.storage import HiCacheStorage

A, B, C = hash_of(1), hash_of(2), hash_of(3)
LIMIT_S = 30.0


@pytest.fixture(params=STORES, ids=lambda one: one.__name__)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place_of(request.param, tmp_path) as one:
        yield one


@pytest.fixture
def store(place: Place) -> Iterator[HiCacheStorage]:
    with place.open() as opened:
        opened.open_space(space())
        yield opened


def test_a_fresh_key_space_is_empty(store: HiCacheStorage) -> None:
    assert [False, False] == store.batch_exists(space(), [A, B])
    assert read(store, A) is None


def test_what_was_set_is_read_back(store: HiCacheStorage) -> None:
    assert [True] == store.batch_set(space(), [A], [page(seed=1)])
    assert [True] == store.batch_exists(space(), [A])
    assert page(seed=1).tobytes() == read(store, A)


def test_a_page_is_read_back_in_another_segmentation(store: HiCacheStorage) -> None:
    if not store.capabilities.scatter_gather:
        pytest.skip("it takes pages of one segment")
    target = Page(bytearray(1), bytearray(4000), bytearray(95))
    store.batch_set(space(), [A], [Page(bytearray(4000), bytearray(b"x" * 96))])

    assert [True] == store.batch_get(space(), [A], [target])
    assert bytes(4000) + b"x" * 96 == target.tobytes()


def test_pages_are_copied_not_kept(store: HiCacheStorage) -> None:
    source = page()
    store.batch_set(space(), [A], [source])
    source.copy_from(bytes(4096))

    assert page().tobytes() == read(store, A)


def test_each_item_has_its_own_verdict(store: HiCacheStorage) -> None:
    targets = [blank(), blank(), blank(), blank()]
    store.batch_set(space(), [A, C], [page(seed=1), page(seed=3)])

    assert [True, False, True, True] == store.batch_get(space(), [A, B, C, A], targets)
    assert [1, 3, 1] == [
        next(seed for seed in range(5) if page(seed=seed).tobytes() == target.tobytes())
        for target in (targets[0], *targets[2:])
    ]
    assert blank().tobytes() == targets[1].tobytes()


def test_a_second_set_leaves_the_old_or_the_new_page(store: HiCacheStorage) -> None:
    store.batch_set(space(), [A], [page(seed=1)])

    assert [True] == store.batch_set(space(), [A], [page(seed=2)])
    assert page(seed=2 if store.capabilities.overwrites else 1).tobytes() == read(store, A)


def test_a_deleted_page_is_gone_and_can_be_set_again(store: HiCacheStorage) -> None:
    store.batch_set(space(), [A], [page(seed=1)])

    assert [True, True] == store.batch_delete(space(), [A, B])
    assert [False] == store.batch_exists(space(), [A])
    assert read(store, A) is None
    assert [True] == store.batch_set(space(), [A], [page(seed=2)])
    assert page(seed=2).tobytes() == read(store, A)


def test_empty_batches_give_empty_lists(store: HiCacheStorage) -> None:
    assert [] == store.batch_exists(space(), [])
    assert [] == store.batch_get(space(), [], [])
    assert [] == store.batch_set(space(), [], [])
    assert [] == store.batch_delete(space(), [])


def test_key_spaces_do_not_see_each_other(store: HiCacheStorage) -> None:
    other = space(tenant="another")
    store.batch_set(space(), [A], [page()])

    assert [False] == store.batch_exists(other, [A])
    assert [False] == store.batch_get(other, [A], [blank()])
    assert [True] == store.batch_delete(other, [A])
    assert [True] == store.batch_exists(space(), [A])


def test_pages_of_one_byte_work(store: HiCacheStorage) -> None:
    small, target = space(page_nbytes=1), Page(bytearray(1))
    store.open_space(small)

    assert [True] == store.batch_set(small, [A], [Page(b"x")])
    assert [True] == store.batch_get(small, [A], [target])
    assert b"x" == target.tobytes()


def test_a_page_of_another_size_is_not_stored(store: HiCacheStorage) -> None:
    pages = [page(), page(5), page()]

    assert [True, False, True] == store.batch_set(space(), [A, B, C], pages)
    assert [True, False, True] == store.batch_exists(space(), [A, B, C])


def test_hashes_without_pages_are_refused(store: HiCacheStorage) -> None:
    with pytest.raises(ValueError, match="2 hashes need as many pages, not 1"):
        store.batch_set(space(), [A, B], [page()])
    with pytest.raises(ValueError, match="1 hashes need as many pages, not 2"):
        store.batch_get(space(), [A], [blank(), blank()])


def test_a_batch_at_its_limit_works_and_one_past_it_is_refused(store: HiCacheStorage) -> None:
    limit = store.capabilities.max_batch
    if limit is None:
        pytest.skip("it takes batches of any size")
    hashes = [hash_of(number) for number in range(limit + 1)]

    assert [True] * limit == store.batch_set(space(), hashes[:limit], [page()] * limit)
    with pytest.raises(UnsupportedOperation, match=f"up to {limit} pages, not {limit + 1}"):
        store.batch_exists(space(), hashes)


def test_the_largest_page_works_and_one_byte_more_is_refused(store: HiCacheStorage) -> None:
    limit = store.capabilities.max_page_nbytes
    if limit is None:
        pytest.skip("it takes pages of any size")
    largest, target = space(page_nbytes=limit), Page(bytearray(limit))
    store.open_space(largest)

    assert [True] == store.batch_set(largest, [A], [Page(b"x" * limit)])
    assert [True] == store.batch_get(largest, [A], [target])
    assert b"x" * limit == target.tobytes()
    with pytest.raises(UnsupportedOperation, match=f"up to {limit} bytes"):
        store.open_space(space(page_nbytes=limit + 1))


def test_clear_removes_its_key_space_and_nothing_else(store: HiCacheStorage) -> None:
    if not store.capabilities.enumerable:
        with pytest.raises(UnsupportedOperation):
            store.clear(space())
        return
    other = space(pool="draft")
    store.batch_set(space(), [A, B], [page(), page()])
    store.batch_set(other, [A], [page()])

    assert 2 == store.clear(space())
    assert [False, False] == store.batch_exists(space(), [A, B])
    assert [True] == store.batch_exists(other, [A])
    assert 0 == store.clear(space())


def test_listings_are_exact_or_refused(store: HiCacheStorage) -> None:
    if not store.capabilities.enumerable:
        for refused in (store.spaces, lambda: store.scan(space())):
            with pytest.raises(UnsupportedOperation):
                refused()
        return
    set_only, opened_only = space(pool="draft"), space(pool="indexer")
    store.batch_set(set_only, [A, B, C], [page(), page(), page()])
    store.batch_delete(set_only, [B])
    store.open_space(opened_only)

    assert {space(), set_only, opened_only} == set(store.spaces())
    assert 3 == len(list(store.spaces()))
    assert [PageInfo(A, 4096), PageInfo(C, 4096)] == sorted(
        store.scan(set_only), key=lambda info: [A, C].index(info.page_hash)
    )
    assert [] == list(store.scan(opened_only))


def test_a_closed_store_refuses_everything_but_close(store: HiCacheStorage) -> None:
    store.close()
    store.close()

    calls: list[Callable[[], object]] = [
        lambda: store.batch_exists(space(), [A]),
        lambda: store.batch_get(space(), [A], [blank()]),
        lambda: store.batch_set(space(), [A], [page()]),
        lambda: store.batch_delete(space(), [A]),
        lambda: store.batch_exists(space(), []),
        lambda: store.open_space(space()),
        store.spaces,
        lambda: store.scan(space()),
        lambda: store.clear(space()),
        lambda: store.register_buffer(bytearray(8)),
        lambda: store.unregister_buffer(bytearray(8)),
        store.stats,
    ]
    for call in calls:
        with pytest.raises(StorageClosed):
            call()


def test_closing_leaves_no_thread_no_descriptor_and_no_temporary_file(place: Place) -> None:
    place.open().close()  # what is loaded once is loaded
    before = ProcessResources.current()
    for _ in range(3):
        with place.open() as store:
            store.open_space(space())
            store.batch_set(space(), [A, B], [page(), page()])
            read(store, A)

    assert [] == remaining_after(before, LIMIT_S)
    assert [] == [path for path in place.path.rglob("*") if path.name.startswith(".tmp")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout_s": 0}, "timeout_s: .*greater than 0"),
        ({"timeout": 1}, "unknown field 'timeout'; did you mean 'timeout_s'"),
    ],
)
def test_a_wrong_config_is_refused_by_field(
    place: Place, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        place.open(**changes)


@pytest.mark.parametrize("storage_class", [DictStore, WireStore])
def test_a_password_is_never_shown(storage_class: type[HiCacheStorage], tmp_path: Path) -> None:
    with (
        place_of(storage_class, tmp_path) as place,
        place.open(password="hunter22") as store,  # noqa: S106 - a made-up one
    ):
        assert "hunter22" not in f"{store!r} {vars(store)!r}"


def test_the_package_loads_no_store_by_itself() -> None:
    assert [] == [
        name
        for name, value in vars(
            importlib.import_module("hicache_conformance.selftest.references")
        ).items()
        if isinstance(value, type)
    ]
