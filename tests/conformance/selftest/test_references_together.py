"""Reference stores with several callers: threads of one handle, and several handles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hicache_conformance.tools.processes.gates import Gate, GatedPage
from pages import hash_of, page, space
from store_places import SHARED, STORES, Place, place_of, read

from hicache_storage.errors import StorageClosed
from hicache_storage.storage import PageInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hicache_storage.storage import HiCacheStorage

A, B = hash_of(1), hash_of(2)
LIMIT_S = 30.0


@pytest.fixture(params=STORES, ids=lambda one: one.__name__)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HiCacheStorage]:
    with place_of(request.param, tmp_path) as place, place.open() as opened:
        opened.open_space(space())
        yield opened


@pytest.fixture(params=SHARED, ids=lambda one: one.__name__)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield the place of a store that several handles share."""
    with place_of(request.param, tmp_path) as place:
        yield place


def test_a_slow_page_does_not_hold_up_other_calls(store: HiCacheStorage) -> None:
    gate, verdicts = Gate(), list[bool]()
    held = GatedPage(page(seed=1), gate)
    thread = threading.Thread(target=lambda: verdicts.extend(store.batch_set(space(), [A], [held])))
    thread.start()
    try:
        assert gate.reached.wait(LIMIT_S)
        assert [True] == store.batch_set(space(), [B], [page(seed=2)])
        assert page(seed=2).tobytes() == read(store, B)
        assert [] == verdicts
    finally:
        gate.open()
        thread.join(LIMIT_S)
    assert [True] == verdicts
    assert page(seed=1).tobytes() == read(store, A)


def test_a_set_that_is_overtaken_by_close_raises(store: HiCacheStorage) -> None:
    gate, raised = Gate(), list[str]()

    def run() -> None:
        try:
            store.batch_set(space(), [A], [GatedPage(page(), gate)])
        except StorageClosed:
            raised.append("closed")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert gate.reached.wait(LIMIT_S)
        store.close()
    finally:
        gate.open()
        thread.join(LIMIT_S)
    assert ["closed"] == raised


def test_readers_see_whole_pages_while_writers_change_them(store: HiCacheStorage) -> None:
    versions = {page(seed=seed).tobytes() for seed in range(3)} | {None}
    seen: set[bytes | None] = set()
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                for _ in range(25):
                    work()
            except BaseException as error:  # noqa: BLE001 - told below
                errors.append(error)

        return threading.Thread(target=run)

    def writing(seed: int) -> Callable[[], object]:
        return lambda: (
            store.batch_set(space(), [A, B], [page(seed=seed)] * 2),
            store.batch_delete(space(), [A]),
        )

    threads = [guarded(writing(seed)) for seed in range(3)]
    threads += [guarded(lambda: seen.update(read(store, one) for one in (A, B))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert [] == errors
    assert seen <= versions
    assert read(store, B) in versions


def test_a_second_handle_sees_what_the_first_set(shared: Place) -> None:
    with shared.open() as first, shared.open() as second:
        first.batch_set(space(), [A], [page(seed=1)])

        assert page(seed=1).tobytes() == read(second, A)
        assert [space()] == list(second.spaces())
        assert [PageInfo(A, 4096)] == list(second.scan(space()))
        second.batch_delete(space(), [A])
        assert [False] == first.batch_exists(space(), [A])


def test_pages_outlive_their_handle(shared: Place) -> None:
    with shared.open() as first:
        first.batch_set(space(), [A], [page(seed=1)])

    with shared.open() as second:
        assert page(seed=1).tobytes() == read(second, A)


def test_many_handles_are_opened_and_used_at_once(shared: Place) -> None:
    errors: list[Exception] = []

    def use(number: int) -> None:
        try:
            for _ in range(5):
                with shared.open() as store:
                    assert [True] == store.batch_set(space(), [A], [page(seed=number)])
                    assert read(store, A) in {page(seed=seed).tobytes() for seed in range(4)}
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)

    assert [] == errors
