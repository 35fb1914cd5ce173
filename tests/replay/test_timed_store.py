"""The times and failures of a page store that a replay measures."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage import KeySpace, Page, Shard, StorageUnavailable
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.page_store.results import Transfer
from hicache_storage.replay.timed_store import BusyTime, TimedPageStore
from hicache_storage.testing import Fault, FaultyStorage, Strike


def test_calls_that_overlap_are_counted_once() -> None:
    busy, begun, end = BusyTime(), threading.Barrier(3), threading.Event()

    def call() -> None:
        with busy.call():
            begun.wait(30)
            end.wait(30)

    before_s = time.perf_counter()
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    end.wait(0.05)
    end.set()
    for thread in threads:
        thread.join()

    assert 0.05 <= busy.total_s <= time.perf_counter() - before_s


def test_no_time_passes_where_no_call_runs() -> None:
    busy = BusyTime()
    with busy.call():
        pass
    total_s = busy.total_s
    time.sleep(0.01)

    assert busy.total_s == total_s


class _Odd(MemoryStorage):
    """A storage that refuses pages whose hash begins with 1, and raises for those that begin with 2."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if any(name.startswith("2") for name in hashes):
            raise StorageUnavailable("gone")
        return [not name.startswith("1") for name in hashes]


def _space(pool: str) -> KeySpace:
    return KeySpace(
        model="m",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=1,
        page_nbytes=8,
        shard=Shard(layers=(0, 1)),
        pool=pool,
    )


def _transfer(store: TimedPageStore, *hashes: str) -> Transfer:
    space = _space("kv")
    store.open_space(space)
    pages = [Page(bytearray(8)) for _ in hashes]
    return Transfer(space, hashes, pages)


def test_only_pages_that_were_absent_are_removed() -> None:
    first, second, third = (digit * 32 for digit in "345")
    with MemoryStorage() as storage:
        with TimedPageStore(storage, PageStoreSettings()) as store:
            store.save([_transfer(store, second)])
        with TimedPageStore(storage, PageStoreSettings(), undoes=True) as store:
            transfer = _transfer(store, first, second, third)
            store.save([transfer])

            assert 0 == store.remove_own_pages()
            assert [False, True, False] == store.present(transfer.space, transfer.hashes)


def test_pages_without_an_answer_stay_and_count() -> None:
    names = "3" * 32, "4" * 32
    faulty = FaultyStorage(MemoryStorage(), (Strike("batch_exists", 0, Fault.RAISE),))
    with (
        faulty as storage,
        TimedPageStore(storage, PageStoreSettings(), undoes=True) as store,
    ):
        transfer = _transfer(store, *names)
        store.save([transfer])

        assert 2 == store.remove_own_pages()
        assert [True, True] == store.present(transfer.space, names)


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        (["0" * 32, "1" * 32], {"refused": 1}),
        (["2" * 32], {"unavailable": 1}),
        (["0" * 32], {}),
    ],
)
def test_a_page_that_is_not_stored_counts_once_with_its_reason(
    hashes: list[str], expected: dict[str, int]
) -> None:
    with _Odd() as storage, TimedPageStore(storage, PageStoreSettings()) as store:
        transfers: list[Transfer] = []
        for pool in ("kv", "draft"):
            space = _space(pool)
            store.open_space(space)
            pages = [Page(bytearray(8)) for _ in hashes]
            transfers.append(Transfer(space, hashes, pages))
        store.save(transfers)

        assert expected == store.unsaved
