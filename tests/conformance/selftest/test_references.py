"""Facts of reference stores that the kit does not check: what they refuse, simultaneous callers."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hicache_conformance.tools.processes.gates import Gate, GatedPage
from hicache_conformance.tools.processes.resources import ProcessResources, remaining_after
from pages import blank, hash_of, page, space
from store_places import SHARED, STORES, Place, place_of, read

from hicache_storage.errors import StorageClosed
from hicache_storage.storage import HiCacheStorage

A, B = hash_of(1), hash_of(2)
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


@pytest.fixture(params=SHARED, ids=lambda one: one.__name__)
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Yield the place of a store that several handles share."""
    with place_of(request.param, tmp_path) as place:
        yield place


def test_hashes_without_pages_are_refused(store: HiCacheStorage) -> None:
    with pytest.raises(ValueError, match="2 hashes need as many pages, not 1"):
        store.batch_set(space(), [A, B], [page()])
    with pytest.raises(ValueError, match="1 hashes need as many pages, not 2"):
        store.batch_get(space(), [A], [blank(), blank()])


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


def test_the_package_loads_no_store_by_itself() -> None:
    assert [] == [
        name
        for name, value in vars(
            importlib.import_module("hicache_conformance.selftest.references")
        ).items()
        if isinstance(value, type)
    ]


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
