"""Limits of prefetches: their share of L2, the bytes in flight, the write queue, and deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engines import PROMPT, cache_pools, compute, engine_on, is_right, leaked, until
from pages import hash_of
from stores import Gate, HookedStorage

from hicache_storage.backend_support.byte_limit import ByteLimit
from hicache_storage.controller import DropPolicy, PrefetchPolicy, Reason
from hicache_storage.controller.prefetch_quota import PrefetchQuota
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Outcome, Transfer
from hicache_storage.storage import Capabilities


@pytest.fixture
def storage() -> HookedStorage:
    storage = HookedStorage(Capabilities(parallelism=8))
    with engine_on(storage, cache_pools()) as first:
        compute(first, PROMPT)
        compute(first, OTHER)
        assert first.drain(20)
    return storage


OTHER = [hash_of(100 + number) for number in range(8)]


class TestCapacity:
    def test_unfinished_prefetches_leave_the_rest_of_l2_alone(self, storage: HookedStorage) -> None:
        with engine_on(storage, cache_pools(), prefetch_capacity=0.5) as engine:
            first = engine.prefetch("first", PROMPT)
            first._job._complete.wait(20)
            with engine.prefetch("second", OTHER).result() as lease:
                assert lease.pages == 0
            assert engine.explain("second").reason is Reason.CAPACITY_LIMIT
            assert engine.stats()["over_capacity_pages"] == 8

            first.result().release()
            with engine.prefetch("third", OTHER).result() as lease:
                assert lease.pages == 8
            assert not leaked(engine)

    def test_a_cancelled_prefetch_releases_its_quota(self, storage: HookedStorage) -> None:
        with engine_on(storage, cache_pools(), prefetch_capacity=0.5) as engine:
            first = engine.prefetch("first", PROMPT)
            first._job._complete.wait(20)
            first.cancel()

            assert engine.prefetch("second", OTHER).result().pages == 8

    def test_a_prefetch_larger_than_the_limit_is_admitted_alone(self) -> None:
        quota = PrefetchQuota(10)

        assert quota.acquire(40)
        assert not quota.acquire(1)
        quota.release(40)
        assert quota.acquire(9)
        assert quota.acquire(9)
        assert not quota.acquire(1)


class TestInFlight:
    def test_batches_are_cut_to_the_limit(self, storage: HookedStorage) -> None:
        page_nbytes = sum(pool.space.page_nbytes for pool in cache_pools())
        with engine_on(
            storage, cache_pools(), inflight_nbytes=2 * page_nbytes, batch_pages=16
        ) as engine:
            storage.batches.clear()
            with engine.prefetch("r", PROMPT).result() as lease:
                assert lease.pages == 16
                assert is_right(lease)
        assert {size for name, size in storage.batches if name == "batch_get"} <= {1, 2}

    def test_the_bytes_of_a_hung_call_count_until_its_deadline(
        self, storage: HookedStorage
    ) -> None:
        page_nbytes = sum(pool.space.page_nbytes for pool in cache_pools())
        gate = Gate()
        with engine_on(
            storage, cache_pools(), timeout_s=1, inflight_nbytes=4 * page_nbytes
        ) as engine:
            storage.hooks["batch_get"] = gate
            assert engine.prefetch("hung", PROMPT).result().pages == 0
            storage.hooks.clear()

            assert not leaked(engine)
            assert engine.prefetch("again", OTHER).result().pages == 8
            gate.open()

    def test_the_wait_for_its_turn_is_part_of_the_time_of_a_load(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def acquire_late(limit: ByteLimit, nbytes: int, timeout_s: float) -> bool:
            time.sleep(0.2)  # the others' bytes are on their way
            return entered(limit, nbytes, timeout_s)

        entered = ByteLimit.acquire
        monkeypatch.setattr(ByteLimit, "acquire", acquire_late)
        given_s: list[float] = []
        load = PageStore.load

        def load_in_time(
            store: PageStore, transfers: Sequence[Transfer], *, timeout_s: float
        ) -> Outcome:
            given_s.append(timeout_s)
            return load(store, transfers, timeout_s=timeout_s)

        monkeypatch.setattr(PageStore, "load", load_in_time)
        with engine_on(storage, cache_pools(), timeout_s=30) as engine:
            engine.prefetch("r", PROMPT).result().release()

        assert given_s
        assert max(given_s) <= 29.8


class TestWriteQueue:
    @pytest.mark.parametrize(
        ("policy", "kept"), [(DropPolicy.NEWEST, [0, 1, 2]), (DropPolicy.OLDEST, [0, 6, 7])]
    )
    def test_a_full_queue_drops_one_end(self, policy: DropPolicy, kept: list[int]) -> None:
        storage = HookedStorage()
        gate = Gate()
        storage.hooks["batch_set"] = gate
        with engine_on(
            storage, cache_pools(), write_queue_pages=2, batch_pages=1, drop_policy=policy
        ) as engine:
            compute(engine, PROMPT[:1])
            assert gate.entered.wait(20)
            compute(engine, PROMPT[1:8])
            assert engine.stats()["dropped_pages"] == 5
            gate.open()
            assert engine.drain(20)
            assert not leaked(engine)

        (space, _) = storage.inner.spaces()
        there = storage.inner.batch_exists(space, PROMPT[:8])
        assert kept == [page for page, ok in enumerate(there) if ok]


class TestDeadline:
    def test_nothing_is_waited_for_behind_it(self, storage: HookedStorage) -> None:
        gate = Gate()
        passed = threading.Semaphore(2)  # the first batch: the target's call and the draft's

        def hold_later_calls(answer: Callable[[], Any]) -> Any:
            return answer() if passed.acquire(blocking=False) else gate(answer)

        storage.hooks["batch_get"] = hold_later_calls
        with engine_on(storage, cache_pools()) as engine:
            with engine.prefetch("r", PROMPT, deadline_s=1).result() as lease:
                assert lease.pages == 4
                assert is_right(lease)
            assert engine.explain("r").reason in (Reason.DEADLINE, Reason.TIMEOUT)
            gate.open()
            until(lambda: not leaked(engine))

    def test_a_deadline_that_has_passed_gives_what_l2_has(self, storage: HookedStorage) -> None:
        with engine_on(storage, cache_pools()) as engine:
            engine.prefetch("head", PROMPT[:3]).result().release()
            with engine.prefetch("r", PROMPT, deadline_s=0).result() as lease:
                assert lease.pages == 3
            assert engine.explain("r").reason is Reason.DEADLINE


def test_best_effort_is_explained_as_no_wait(storage: HookedStorage) -> None:
    gate = Gate()
    storage.hooks["batch_exists"] = gate
    with engine_on(storage, cache_pools(), prefetch_policy=PrefetchPolicy.BEST_EFFORT) as engine:
        engine.prefetch("r", PROMPT).result().release()
        assert engine.explain("r").reason is Reason.PATIENCE
        gate.open()
