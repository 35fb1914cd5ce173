from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from engines import PROMPT, cache_pools, compute, free_slots, is_right, until
from pages import hash_of
from stores import Gate, HookedStorage, failing

from hicache_storage.controller import (
    CacheController,
    ControllerSettings,
    Lease,
    PrefetchPolicy,
    Reason,
    WritePolicy,
)
from hicache_storage.errors import StorageClosed, StorageUnavailable
from hicache_storage.page_store import PageStore, PageStoreSettings


@pytest.fixture
def storage() -> HookedStorage:
    return HookedStorage()


@pytest.fixture
def engine(storage: HookedStorage) -> Iterator[Callable[..., CacheController]]:
    """Return a factory of engines on one storage, each with its own L2."""
    with ExitStack() as stack:

        def start(slots: int = 32, timeout_s: float = 20, **settings: Any) -> CacheController:
            store = stack.enter_context(
                PageStore(storage, PageStoreSettings(timeout_s=timeout_s, breaker_failures=100))
            )
            defaults: dict[str, Any] = {
                "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
                "prefetch_threshold_tokens": 0,
                "batch_pages": 4,
            }
            controller = CacheController(
                store, cache_pools(slots), ControllerSettings(**{**defaults, **settings})
            )
            return stack.enter_context(controller)

        yield start


def store_prompt(engine: Callable[..., CacheController]) -> None:
    """Compute the prompt on another engine, so that L3 has all its pages."""
    controller = engine()
    compute(controller, PROMPT)
    assert controller.drain(20)


def fetch(controller: CacheController, hashes: list[str]) -> Lease:
    return controller.prefetch("request", hashes).result()


class TestPrefetch:
    def test_a_controller_that_was_not_started_says_so(self, storage: HookedStorage) -> None:
        """Without its threads, the result would never come."""
        with PageStore(storage) as store:
            controller = CacheController(store, cache_pools(4))
            with pytest.raises(RuntimeError, match=r"call start\(\) first"):
                controller.prefetch("request", PROMPT[:4])
            controller.start()
            assert controller.prefetch("request", PROMPT[:4]).result().pages == 0
            assert controller.close()

    def test_pages_that_one_engine_computed_are_loaded_by_another(
        self, engine: Callable[..., CacheController]
    ) -> None:
        first, second = engine(), engine()
        compute(first, PROMPT)
        assert first.drain(20)

        with fetch(second, PROMPT) as lease:
            assert (lease.pages, lease.l2_pages, lease.l3_pages) == (16, 0, 16)
            assert is_right(lease)

    def test_pages_in_l2_are_not_loaded(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine()
        compute(controller, PROMPT)
        controller.drain(20)

        with fetch(controller, PROMPT) as lease:
            assert (lease.l2_pages, lease.l3_pages) == (16, 0)
            assert is_right(lease)
        assert not storage.calls["batch_get"]

    def test_an_unknown_prompt_has_no_pages(self, engine: Callable[..., CacheController]) -> None:
        with fetch(engine(), PROMPT) as lease:
            assert lease.pages == 0

    def test_l2_and_l3_make_one_prefix(self, engine: Callable[..., CacheController]) -> None:
        """L2 has the head and the tail of the prompt, L3 has the middle. Only the middle is loaded."""
        first, second = engine(), engine()
        compute(first, PROMPT[4:12])
        first.drain(20)
        compute(second, PROMPT[:4])
        compute(second, PROMPT[12:])

        with fetch(second, PROMPT) as lease:
            assert (lease.l2_pages, lease.l3_pages) == (8, 8)
            assert list(range(4, 12)) == lease.loaded
            assert is_right(lease)

    def test_a_prefix_ends_where_the_draft_ends(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        """SGLang issue 32176: a target page without its draft page is no hit."""
        store_prompt(engine)
        second = engine()
        (draft,) = (known for known in storage.inner.spaces() if known.pool == "draft")
        storage.inner.batch_delete(draft, PROMPT[6:7])

        with fetch(second, PROMPT) as lease:
            assert lease.pages == 6
            assert is_right(lease)

    def test_a_page_that_vanishes_after_the_match_ends_the_prefix(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        """KV-503: an exists answer is not a promise. Here a page of the draft has vanished."""
        store_prompt(engine)
        second = engine()
        (draft,) = (known for known in storage.inner.spaces() if known.pool == "draft")

        def vanish(answer: Callable[[], Any]) -> Any:
            storage.inner.batch_delete(draft, PROMPT[9:10])
            return answer()

        storage.hooks["batch_get"] = vanish

        with fetch(second, PROMPT) as lease:
            assert lease.pages == 9
            assert is_right(lease)
        assert [21, 21] == free_slots(second)  # pages 10 and 11 did arrive: L2 keeps them

    def test_fewer_tokens_than_the_threshold_are_not_fetched(
        self, engine: Callable[..., CacheController]
    ) -> None:
        first = engine()
        second = engine(prefetch_threshold_tokens=16 * 16 + 1)
        third = engine(prefetch_threshold_tokens=16 * 16)
        compute(first, PROMPT)
        first.drain(20)

        assert fetch(second, PROMPT).pages == 0
        assert fetch(third, PROMPT).pages == 16

    def test_a_prompt_larger_than_l2_gets_what_fits(
        self, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        second = engine(slots=10)

        with fetch(second, PROMPT) as lease:
            assert lease.pages == 10
            assert is_right(lease)
        assert second.stats()["no_host_slot_pages"] == 2

    def test_a_tail_in_l2_is_evicted_for_the_missing_head(
        self, engine: Callable[..., CacheController]
    ) -> None:
        """L2 is full of the prompt's last pages, which are useless without the pages before them."""
        store_prompt(engine)
        second = engine(slots=8)
        compute(second, PROMPT[8:])
        second.drain(20)

        with fetch(second, PROMPT) as lease:
            assert (lease.pages, lease.l3_pages) == (8, 8)
            assert is_right(lease)
        assert second.explain("request").reason is Reason.NO_HOST_SLOT
        assert second.cache.clear() == 0

    def test_a_released_prefix_can_be_evicted_and_a_held_one_not(
        self, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine(slots=16)
        compute(controller, PROMPT)
        controller.drain(20)
        other = [hash_of(100 + number) for number in range(4)]

        lease = fetch(controller, PROMPT)
        assert compute(controller, other, timeout_s=0) == 0
        lease.release()
        lease.release()
        assert compute(controller, other, timeout_s=0) == 4

    def test_a_result_is_taken_once(self, engine: Callable[..., CacheController]) -> None:
        prefetch = engine().prefetch("r1", PROMPT)
        prefetch.result().release()

        with pytest.raises(RuntimeError, match="'r1' has already ended"):
            prefetch.result()


class TestMaxWait:
    def slow_engine(
        self, storage: HookedStorage, engine: Callable[..., CacheController], **settings: Any
    ) -> tuple[CacheController, Gate]:
        """Make L3 return the prompt's first batch at once, and the second after the gate opens."""
        store_prompt(engine)
        gate = Gate()
        passed = threading.Semaphore(
            2
        )  # the first batch: one call for the target, one for the draft

        def hold_later_calls(answer: Callable[[], Any]) -> Any:
            return answer() if passed.acquire(blocking=False) else gate(answer)

        storage.hooks["batch_get"] = hold_later_calls
        return engine(**settings), gate

    def test_best_effort_takes_what_has_arrived(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller, gate = self.slow_engine(
            storage, engine, prefetch_policy=PrefetchPolicy.BEST_EFFORT
        )
        prefetch = controller.prefetch("request", PROMPT)
        assert gate.entered.wait(20)

        with prefetch.result() as lease:
            assert lease.pages == 4
            assert is_right(lease)
            gate.open()

    def test_a_deadline_that_never_comes_is_one(
        self, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)

        with engine().prefetch("request", PROMPT, deadline_s=math.inf).result() as lease:
            assert lease.pages == 16

    def test_timeout_stops_waiting(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller, gate = self.slow_engine(
            storage, engine, prefetch_timeout_base_s=1, prefetch_policy=PrefetchPolicy.TIMEOUT
        )
        prefetch = controller.prefetch("request", PROMPT)
        assert gate.entered.wait(20)

        with prefetch.result() as lease:
            assert lease.pages == 4
            gate.open()

    def test_pages_that_arrive_too_late_are_counted_and_stay_in_l2_for_the_next(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller, gate = self.slow_engine(
            storage, engine, prefetch_policy=PrefetchPolicy.BEST_EFFORT
        )
        prefetch = controller.prefetch("request", PROMPT)
        assert gate.entered.wait(20)
        lease = prefetch.result()
        gate.open()
        while not prefetch.complete:
            prefetch._job._complete.wait(20)
        lease.release()

        assert controller.stats()["loaded_unused_pages"] == 4
        with fetch(controller, PROMPT[:8]) as second:
            assert second.l2_pages == 8
            assert is_right(second)

    def test_cancel_releases_everything(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller, gate = self.slow_engine(storage, engine)
        prefetch = controller.prefetch("request", PROMPT)
        assert gate.entered.wait(20)

        prefetch.cancel()
        prefetch.cancel()
        gate.open()
        prefetch._job._complete.wait(20)

        assert controller.cache.clear() == 0
        assert [32, 32] == free_slots(controller)
        assert controller.stats()["cancelled_requests"] == 1


class TestWriting:
    def stored(self, storage: HookedStorage) -> int:
        return sum(len(list(storage.inner.scan(known))) for known in storage.inner.spaces())

    def test_write_through_writes_every_page_of_every_pool_once(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine()
        compute(controller, PROMPT)
        fetch(controller, PROMPT).release()
        assert controller.drain(20)

        assert self.stored(storage) == 32
        assert controller.stats()["written_pages"] == 16

    def test_selective_writes_on_the_second_use(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
        compute(controller, PROMPT)
        controller.drain(20)
        assert self.stored(storage) == 0

        fetch(controller, PROMPT[:5]).release()
        controller.drain(20)

        assert self.stored(storage) == 10

    def test_write_back_writes_what_is_evicted(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine(slots=16, write_policy=WritePolicy.WRITE_BACK)
        compute(controller, PROMPT)
        controller.drain(20)
        assert self.stored(storage) == 0

        other = [hash_of(100 + number) for number in range(4)]
        assert compute(controller, other) == 4

        controller.drain(20)
        assert self.stored(storage) == 8

    def test_write_back_evicts_for_loaded_pages(
        self, engine: Callable[..., CacheController]
    ) -> None:
        """L2 is full of pages that must be written before their eviction, and L3 has the prompt."""
        store_prompt(engine)
        second = engine(slots=16, write_policy=WritePolicy.WRITE_BACK)
        compute(second, [hash_of(300 + number) for number in range(16)])

        with fetch(second, PROMPT) as lease:
            assert lease.l3_pages == 16
            assert is_right(lease)
        second.drain(20)
        assert second.stats()["written_pages"] == 16

    def test_write_back_waits_for_the_slots_of_every_page(
        self, engine: Callable[..., CacheController]
    ) -> None:
        """Some of L2's pages are in L3 and can be evicted at once. The others must be written first."""
        store_prompt(engine)
        second = engine(slots=16, batch_pages=16, write_policy=WritePolicy.WRITE_BACK)
        fetch(second, PROMPT[12:]).release()
        compute(second, [hash_of(300 + number) for number in range(12)])

        with fetch(second, PROMPT[:8]) as lease:
            assert 8 == lease.l3_pages
            assert is_right(lease)

    def test_a_cancelled_prefetch_does_not_wait_for_slots(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        second = engine(slots=16, timeout_s=1000, write_policy=WritePolicy.WRITE_BACK)
        compute(second, [hash_of(300 + number) for number in range(16)])
        storage.hooks["batch_set"] = gate = Gate()
        waiting = second.prefetch("waiting", PROMPT)
        assert gate.entered.wait(20)

        waiting.cancel()

        until(lambda: waiting.complete)
        gate.open()

    def test_prefetches_that_hold_all_slots_do_not_wait_for_each_other(
        self, engine: Callable[..., CacheController]
    ) -> None:
        prompts = [[hash_of(100 * number + page) for page in range(16)] for number in (1, 2)]
        for prompt in prompts:
            compute(first := engine(), prompt)
            assert first.drain(20)
        second = engine(
            slots=16,
            timeout_s=1000,
            prefetch_threads=2,
            prefetch_capacity=1.0,
            write_policy=WritePolicy.WRITE_BACK,
        )

        started = [second.prefetch(prompt[0], prompt) for prompt in prompts]

        until(lambda: all(prefetch.complete for prefetch in started))
        for prefetch in started:
            with prefetch.result() as lease:
                assert is_right(lease)

    def test_pages_that_came_from_l3_are_not_written_again(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        second = engine()
        writes = storage.calls["batch_set"]

        fetch(second, PROMPT).release()
        second.drain(20)

        assert writes == storage.calls["batch_set"]

    def test_a_dropped_page_is_written_when_it_is_used_again(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        gate = Gate()
        storage.hooks["batch_set"] = gate
        controller = engine(write_queue_pages=1, batch_pages=1)
        compute(controller, PROMPT[:1])
        assert gate.entered.wait(20)
        compute(controller, PROMPT[1:4])
        gate.open()
        controller.drain(20)

        for _ in range(2):
            fetch(controller, PROMPT[:4]).release()
            controller.drain(20)

        assert self.stored(storage) == 8

    def test_pages_being_written_are_not_evicted(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        gate = Gate()
        storage.hooks["batch_set"] = gate
        controller = engine(slots=8)
        compute(controller, PROMPT[:8])
        assert gate.entered.wait(20)

        assert compute(controller, PROMPT[8:], timeout_s=0) == 0

        gate.open()
        assert controller.drain(20)
        assert compute(controller, PROMPT[8:]) == 8

    def test_abandoned_slots_come_back(self, engine: Callable[..., CacheController]) -> None:
        controller = engine()
        reservation = controller.reserve(PROMPT)

        reservation.abandon()
        reservation.abandon()

        assert [32, 32] == free_slots(controller)
        with pytest.raises(ValueError, match="committed or abandoned"):
            controller.commit(reservation)


class TestFaults:
    @pytest.mark.parametrize(
        "error", [StorageUnavailable("down"), RuntimeError("bug"), SystemExit()]
    )
    @pytest.mark.parametrize("operation", ["batch_exists", "batch_get", "batch_set"])
    def test_a_failing_store_costs_hits_and_nothing_else(
        self,
        storage: HookedStorage,
        engine: Callable[..., CacheController],
        operation: str,
        error: BaseException,
    ) -> None:
        store_prompt(engine)
        second = engine()
        storage.hooks[operation] = failing(error)

        with fetch(second, PROMPT) as lease:
            assert lease.pages == (16 if operation == "batch_set" else 0)
        compute(second, [hash_of(200)])
        assert second.drain(20) == (operation != "batch_set")
        storage.hooks.clear()

        with fetch(second, PROMPT) as lease:
            assert lease.pages == 16
            assert is_right(lease)
        assert second.cache.clear() == 0
        assert [32, 32] == free_slots(second)

    def test_slots_of_a_hung_load_are_free_at_its_deadline_and_it_fills_none_later(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        second = engine(timeout_s=1)
        gate, ended = Gate(), threading.Event()

        def hang(answer: Callable[[], Any]) -> Any:
            found = gate(answer)
            ended.set()
            return found

        storage.hooks["batch_get"] = hang

        assert fetch(second, PROMPT).pages == 0
        assert [32, 32] == free_slots(second)

        used = [buffer for pool in second.cache.pools for buffer in pool.host.buffers]
        for buffer in used:
            buffer[:] = b"\x5a" * len(buffer)
        gate.open()
        assert ended.wait(20)
        second.close()
        assert all(bytes(buffer) == b"\x5a" * len(buffer) for buffer in used)

    def test_pages_of_a_hung_save_are_free_at_its_deadline(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine(slots=4, timeout_s=1)
        gate = Gate()
        storage.hooks["batch_set"] = gate
        compute(controller, PROMPT[:4])
        assert gate.entered.wait(20)
        assert not controller.drain(20)

        assert compute(controller, PROMPT[4:8], timeout_s=0) == 4

        gate.open()

    def test_a_corrupt_page_shortens_the_prefix_and_heals(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        second = engine()
        (target,) = (known for known in storage.inner.spaces() if known.pool == "kv")
        pages = storage.inner._spaces[target]
        pages[PROMPT[5]][-1:] = b"?"

        with fetch(second, PROMPT) as lease:
            assert lease.pages == 5
        compute(second, PROMPT[5:])
        second.drain(20)

        with fetch(engine(), PROMPT) as lease:
            assert lease.pages == 16
            assert is_right(lease)


class TestLifecycle:
    def test_closing_ends_its_threads_and_frees_nothing_twice(self, storage: HookedStorage) -> None:
        before = set(threading.enumerate())
        with PageStore(storage) as store:
            controller = CacheController(store, cache_pools())
            controller.start()
            compute(controller, PROMPT)

            assert controller.close()
            assert controller.close()

        assert not set(threading.enumerate()) - before

    def test_a_closed_controller_takes_no_requests(
        self, engine: Callable[..., CacheController]
    ) -> None:
        controller = engine()
        controller.close()

        with pytest.raises(StorageClosed):
            controller.prefetch("request", PROMPT)

    def test_a_request_during_close_does_not_keep_the_threads_alive(self) -> None:
        """`finish_queued` leaves the marks in the queue that end the threads."""
        controller = CacheController(None, cache_pools())
        worker = controller._prefetch_worker
        worker.stop()

        worker.finish_queued()
        worker.start()

        assert worker.join(5)

    def test_closing_lets_waiting_requests_go_on(
        self, storage: HookedStorage, engine: Callable[..., CacheController]
    ) -> None:
        store_prompt(engine)
        gate = Gate()
        storage.hooks["batch_exists"] = gate
        controller = engine(timeout_s=60)
        controller.prefetch("stuck", PROMPT)
        queued = controller.prefetch("queued", PROMPT)
        assert gate.entered.wait(20)

        assert not controller.close(timeout_s=0.2)

        assert queued.result().pages == 0
        gate.open()

    def test_host_pools_are_registered_for_as_long_as_it_runs(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registered: list[int] = []

        def register(buffer: memoryview) -> None:
            registered.append(len(buffer))

        def unregister(buffer: memoryview) -> None:
            registered.remove(len(buffer))

        monkeypatch.setattr(storage, "register_buffer", register)
        monkeypatch.setattr(storage, "unregister_buffer", unregister)
        pools = cache_pools()
        with PageStore(storage) as store, CacheController(store, pools):
            assert sorted(registered) == sorted(
                len(buffer) for pool in pools for buffer in pool.host.buffers
            )
        assert not registered

    def test_pools_must_go_together(self, storage: HookedStorage) -> None:
        with PageStore(storage) as store:
            with pytest.raises(ValueError, match="at least one pool"):
                CacheController(store, [])
            with pytest.raises(ValueError, match="same key space"):
                CacheController(store, cache_pools()[:1] * 2)

    def test_many_requests_at_once_see_right_pages_only(
        self, engine: Callable[..., CacheController]
    ) -> None:
        """Eight threads use overlapping prompts, and L2 holds a quarter of the pages."""
        controller = engine(slots=48, prefetch_threads=2)
        wrong: list[str] = []

        def serve(number: int) -> None:
            for turn in range(30):
                start = (number * 7 + turn * 3) % 10
                prompt = [hash_of(1000 * (start % 5) + page) for page in range(12)]
                with controller.prefetch(f"{number}-{turn}", prompt).result() as lease:
                    if not is_right(lease):
                        wrong.append(f"{number}-{turn}")
                    missing = prompt[lease.pages :]
                compute(controller, missing, timeout_s=0)

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)

        assert not wrong
        assert controller.drain(20)
        assert controller.stats()["l3_hit_pages"] > 0
        assert controller.cache.clear() == 0
        assert [48, 48] == free_slots(controller)
