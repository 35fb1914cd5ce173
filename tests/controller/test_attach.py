"""Stores that are attached and detached while requests run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from engines import (
    PROMPT,
    cache_pools,
    compute,
    engine_on,
    free_slots,
    is_right,
    leaked,
    page_store,
    until,
    windowed,
)
from pages import hash_of
from stores import Gate, HookedStorage

from hicache_storage.controller import CacheController, Reason, WritePolicy
from hicache_storage.controller.attached_store import AttachedStore
from hicache_storage.errors import StorageClosed, StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.storage import Capabilities


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stored(storage: HookedStorage) -> int:
    return sum(len(list(storage.inner.scan(space))) for space in storage.inner.spaces())


def fetched(engine: CacheController, request_id: str = "r") -> tuple[int, int]:
    """Return the prompt's pages from L2 and from L3, after checking their content."""
    with engine.prefetch(request_id, PROMPT).result() as lease:
        assert is_right(lease)
        return lease.l2_pages, lease.l3_pages


class TestWithoutAStore:
    def test_l2_serves_alone(self) -> None:
        with engine_on(None, cache_pools()) as engine:
            compute(engine, PROMPT[:4])

            assert (4, 0) == fetched(engine)
            assert engine.explain("r").reason is Reason.NO_STORE
            assert engine.drain(0)
            assert not leaked(engine)

    def test_write_back_without_a_store_drops_evicted_pages(self) -> None:
        with engine_on(None, cache_pools(8), write_policy=WritePolicy.WRITE_BACK) as engine:
            compute(engine, PROMPT[:8])
            assert compute(engine, PROMPT[8:]) == 8
            assert not leaked(engine)


class TestAttach:
    def test_pages_of_the_store_are_found_after_attach(self, stack: ExitStack) -> None:
        storage = HookedStorage()
        with engine_on(storage, cache_pools()) as first:
            compute(first, PROMPT)
            first.drain(20)
        store = stack.enter_context(page_store(storage))
        with engine_on(None, cache_pools()) as engine:
            assert (0, 0) == fetched(engine)
            engine.attach(store)
            assert (0, 16) == fetched(engine)

    def test_every_used_page_is_written_to_another_store(self, stack: ExitStack) -> None:
        first, second = HookedStorage(), HookedStorage()
        store = stack.enter_context(page_store(second))
        with engine_on(first, cache_pools()) as engine:
            compute(engine, PROMPT)
            assert engine.detach()
            engine.attach(store)
            assert stored(second) == 0

            fetched(engine)

            assert engine.drain(math.inf)
        assert (32, 32) == (stored(first), stored(second))

    def test_one_store_at_a_time(self, stack: ExitStack) -> None:
        store = stack.enter_context(page_store(HookedStorage()))
        with engine_on(HookedStorage(), cache_pools()) as engine:
            with pytest.raises(RuntimeError, match="detach it first"):
                engine.attach(store)
            engine.close()
            with pytest.raises(StorageClosed):
                engine.attach(store)

    def test_the_next_store_may_have_another_alignment(self, stack: ExitStack) -> None:
        aligned = HookedStorage(Capabilities(alignment=4096))
        store = stack.enter_context(page_store(aligned))
        with engine_on(HookedStorage(), cache_pools()) as engine:
            compute(engine, PROMPT)
            assert engine.detach()
            engine.attach(store)
            assert (16, 0) == fetched(engine)
            assert engine.drain(math.inf)
        assert 32 == stored(aligned)

    def test_a_store_that_fails_is_not_attached(self, stack: ExitStack) -> None:
        bad, good = HookedStorage(), HookedStorage()
        registered: list[int] = []

        def register(buffer: memoryview) -> None:
            if len(registered) == 1:
                raise StorageUnavailable("no room to register")
            registered.append(len(buffer))

        def unregister(buffer: memoryview) -> None:
            registered.remove(len(buffer))

        vars(bad)["register_buffer"] = register
        vars(bad)["unregister_buffer"] = unregister
        with engine_on(None, cache_pools()) as engine:
            with pytest.raises(StorageUnavailable):
                engine.attach(stack.enter_context(page_store(bad)))
            assert not registered

            engine.attach(stack.enter_context(page_store(good)))
            compute(engine, PROMPT)
            assert engine.drain(20)
        assert stored(good) == 32

    def test_all_key_spaces_are_opened_within_one_timeout(self, stack: ExitStack) -> None:
        """Each key space alone opens within the timeout, but all together take longer."""
        storage, pause = HookedStorage(), threading.Event()

        def open_slowly(_: KeySpace) -> None:
            pause.wait(0.6)

        vars(storage)["open_space"] = open_slowly
        with engine_on(None, windowed()) as engine:
            with pytest.raises(StorageTimeout):
                engine.attach(stack.enter_context(page_store(storage, timeout_s=1)))
            assert engine.detach()


class TestDetach:
    @pytest.mark.parametrize(("drain", "pages"), [(True, 32), (False, 8)])
    def test_queued_pages_are_written_first_or_dropped(self, *, drain: bool, pages: int) -> None:
        storage, gate = HookedStorage(), Gate()
        with engine_on(storage, cache_pools()) as engine:
            storage.hooks["batch_set"] = gate
            compute(engine, PROMPT)
            assert gate.entered.wait(20)

            with ThreadPoolExecutor() as pool:
                detached = pool.submit(engine.detach, drain=drain)
                until(lambda: drain or "dropped_pages" in engine.stats())
                gate.open()
                assert detached.result()

            assert pages == stored(storage)
            assert not leaked(engine)

    def test_write_back_writes_its_unsaved_pages(self) -> None:
        storage = HookedStorage()
        with engine_on(storage, cache_pools(), write_policy=WritePolicy.WRITE_BACK) as engine:
            compute(engine, PROMPT)
            assert engine.detach()
            assert stored(storage) == 32

    def test_write_back_writes_more_unsaved_pages_than_its_queue_holds(self) -> None:
        storage = HookedStorage()
        how: dict[str, Any] = {"write_policy": WritePolicy.WRITE_BACK, "write_queue_pages": 2}
        with engine_on(storage, cache_pools(), **how) as engine:
            compute(engine, PROMPT)
        assert stored(storage) == 32

    def test_a_page_that_is_refused_at_once_is_lost(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The write queue is already empty when the detaching thread looks at it."""
        storage, detach = HookedStorage(), AttachedStore.detach

        def detach_once_idle(self: AttachedStore, *args: Any, **how: Any) -> bool:
            until(self.writeback._is_idle)
            return detach(self, *args, **how)

        monkeypatch.setattr(AttachedStore, "detach", detach_once_idle)
        storage.hooks["batch_set"] = lambda answer: [False] * len(answer())
        with engine_on(storage, cache_pools(), write_policy=WritePolicy.WRITE_BACK) as engine:
            compute(engine, PROMPT)

            assert not engine.detach()

            assert engine.stats()["unwritten_pages"] == 16
            assert not leaked(engine)

    def test_a_lost_page_stays_lost_at_the_next_detach(self, stack: ExitStack) -> None:
        storage = HookedStorage()
        storage.hooks["batch_set"] = lambda answer: [False] * len(answer())
        store = stack.enter_context(page_store(HookedStorage()))
        with engine_on(storage, cache_pools(), write_policy=WritePolicy.WRITE_BACK) as engine:
            compute(engine, PROMPT)
            assert [False, False] == [engine.detach(), engine.detach()]

            engine.attach(store)
            assert [True, True] == [engine.detach(), engine.close()]

    def test_a_controller_that_never_started_closes_at_once(self, stack: ExitStack) -> None:
        store = stack.enter_context(page_store(HookedStorage()))
        engine = CacheController(store, cache_pools())
        compute(engine, PROMPT)

        assert not engine.close(timeout_s=1e9)
        assert engine.stats()["dropped_pages"] == 16
        assert not leaked(engine)

    def test_a_prefetch_in_progress_ends_with_what_has_arrived(self) -> None:
        storage, gate = HookedStorage(), Gate()
        with engine_on(storage, cache_pools()) as first:
            compute(first, PROMPT)
            first.drain(20)
        with engine_on(storage, cache_pools()) as engine:
            storage.hooks["batch_get"] = gate
            prefetch = engine.prefetch("r", PROMPT)
            assert gate.entered.wait(20)
            detached: list[bool] = []
            detaching = threading.Thread(target=lambda: detached.append(engine.detach()))
            detaching.start()
            until(lambda: engine._attached is None)
            gate.open()
            with prefetch.result() as lease:
                assert lease.pages == 4
                assert is_right(lease)
            detaching.join(20)
            assert detached == [True]
            assert engine.explain("r").reason is Reason.DETACHED
            assert not leaked(engine)

    def test_pages_found_and_not_read_are_explained(self) -> None:
        """The store is detached between the lookup and the first read."""
        storage, gate = HookedStorage(), Gate()
        with engine_on(storage, cache_pools()) as engine:
            compute(engine, PROMPT)
            assert engine.drain(20)
            engine.cache.clear()
            attached = engine._attached
            assert attached is not None
            storage.hooks["batch_exists"] = gate
            prefetch = engine.prefetch("r", PROMPT)
            assert gate.entered.wait(20)
            detaching = threading.Thread(target=engine.detach)
            detaching.start()
            until(lambda: attached.closing)
            gate.open()
            with prefetch.result() as lease:
                assert lease.pages == 0
            detaching.join(20)
            assert engine.explain("r").reason is Reason.DETACHED

    def test_a_hung_store_is_left_behind_with_its_pages_and_no_others(self) -> None:
        storage, gate = HookedStorage(), Gate()
        unregistered = threading.Event()

        def unregister(buffer: memoryview) -> None:
            unregistered.set()

        vars(storage)["unregister_buffer"] = unregister
        with engine_on(storage, cache_pools(), timeout_s=1) as engine:
            storage.hooks["batch_set"] = gate
            compute(engine, PROMPT[:4])
            assert gate.entered.wait(20)

            assert not engine.detach(timeout_s=0.3)
            assert not unregistered.is_set()
            assert (4, 0) == fetched(engine)

            gate.open()
            assert unregistered.wait(20)
            until(lambda: not leaked(engine))
            assert [32, 32] == free_slots(engine)

    def test_a_late_save_of_an_old_store_marks_no_page_as_stored(self, stack: ExitStack) -> None:
        """A save to the first store ends after a second store was attached, which lacks the page."""
        first, second, gate = HookedStorage(), HookedStorage(), Gate()
        with engine_on(first, cache_pools(), timeout_s=20) as engine:
            first.hooks["batch_set"] = gate
            compute(engine, PROMPT[:4])
            assert gate.entered.wait(20)
            assert not engine.detach(drain=False, timeout_s=0.1)
            engine.attach(stack.enter_context(page_store(second)))
            gate.open()
            until(lambda: stored(first) >= 8)
            until(lambda: not any(entry.queued for entry in engine.cache._entries.values()))
            fetched(engine)
            assert engine.drain(20)
        assert stored(second) == 8

    @pytest.mark.parametrize("end", ["detach", "close"])
    def test_true_is_returned_where_every_page_is_in_the_store(self, end: str) -> None:
        """The store is so slow that only some writes end in time. The other pages are reported."""
        storage, slow = HookedStorage(), threading.Event()

        def late(answer: Callable[[], Any]) -> Any:
            slow.wait(0.02)
            return answer()

        storage.hooks["batch_set"] = late
        how: dict[str, Any] = {"write_policy": WritePolicy.WRITE_BACK, "batch_pages": 1}
        with engine_on(storage, cache_pools(), **how) as engine:
            compute(engine, PROMPT)

            assert not getattr(engine, end)(drain=True, timeout_s=0.1)

            assert engine.stats()["dropped_pages"] > 0
            assert stored(storage) < 32

    def test_a_page_that_the_store_refuses_is_reported(self) -> None:
        storage = HookedStorage()
        storage.hooks["batch_set"] = lambda answer: [False] * len(answer())
        with engine_on(storage, cache_pools()) as engine:
            compute(engine, PROMPT)

            assert not engine.detach()

            assert engine.stats()["unwritten_pages"] == 16

    def test_a_page_that_close_dropped_is_reported_by_the_next_close_too(self) -> None:
        storage = HookedStorage()
        storage.hooks["batch_set"] = lambda answer: [False] * len(answer())
        with engine_on(storage, cache_pools()) as engine:
            compute(engine, PROMPT)

            assert [False, False] == [engine.close(), engine.close()]

    def test_host_pools_stay_registered_while_a_save_runs(self) -> None:
        """The timeout of the store's calls is longer than the timeout of the detach."""
        storage, gate = HookedStorage(), Gate()
        pools = cache_pools()
        sizes = {buffer.nbytes for pool in pools for buffer in pool.host.buffers}
        registered: list[int] = []

        def register(buffer: memoryview) -> None:
            registered.extend([len(buffer)] * (len(buffer) in sizes))  # not the private memory

        def unregister(buffer: memoryview) -> None:
            if len(buffer) in sizes:
                registered.remove(len(buffer))

        vars(storage)["register_buffer"] = register
        vars(storage)["unregister_buffer"] = unregister
        with engine_on(storage, pools, timeout_s=60) as engine:
            storage.hooks["batch_set"] = gate
            compute(engine, PROMPT[:4])
            assert gate.entered.wait(20)
            before = len(registered)
            assert before

            assert not engine.detach(drain=False, timeout_s=0.1)
            assert len(registered) == before
            assert not engine.detach(timeout_s=0.1)  # it still runs

            gate.open()
            assert engine.detach(timeout_s=20)
            until(lambda: not registered)

    def test_it_is_idempotent(self) -> None:
        with engine_on(HookedStorage(), cache_pools()) as engine:
            assert engine.detach()
            assert engine.detach()


def requests_pass(engine: CacheController, count: int) -> None:
    """Wait until the engine has served `count` further requests."""
    enough = engine.stats().get("requests", 0) + count
    until(lambda: engine.stats().get("requests", 0) >= enough)


def test_stores_come_and_go_under_load(stack: ExitStack) -> None:
    """Four threads use overlapping prompts while two stores are attached in turn, twenty times."""
    storages = [HookedStorage(), HookedStorage()]
    stores = [stack.enter_context(page_store(storage)) for storage in storages]
    before = set(threading.enumerate())
    wrong: list[Any] = []
    stop = threading.Event()

    def serve(number: int, engine: CacheController) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            prompt = [hash_of(100 * ((number + turn) % 6) + page) for page in range(8)]
            try:
                with engine.prefetch(f"{number}-{turn}", prompt).result() as lease:
                    wrong.extend([lease.pages] * (not is_right(lease)))
                    missing = prompt[lease.pages :]
                compute(engine, missing, timeout_s=0)
            except Exception as error:  # noqa: BLE001 - reported below
                wrong.append(error)

    with engine_on(None, cache_pools(24), prefetch_threads=2) as engine:
        threads = [threading.Thread(target=serve, args=(number, engine)) for number in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(20):
            engine.attach(stores[turn % 2])
            requests_pass(engine, 5)
            assert engine.detach(drain=turn % 3 == 0, timeout_s=20)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert not leaked(engine)
        assert engine.stats()["l3_hit_pages"] > 0
    assert not set(threading.enumerate()) - before
