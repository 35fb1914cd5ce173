"""Calls that were begun: their futures, deadlines, order and end, and the same calls in this thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from clocks import ends_in
from framed import DRAFT, HASHES, NBYTES, TARGET, bytes_of, empty, filled, transfer
from hicache_backends.file import FileStorage
from servers import wait_until
from stores import Gate, HookedStorage

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, Verdict
from hicache_storage.page_store.begun import Call, Calls, Waiting, finish
from hicache_storage.storage import Capabilities

OK, TIMEOUT = Verdict.OK, Verdict.TIMEOUT
OpenStore = Callable[..., PageStore]


def used_again(pages: list[Page]) -> list[bytes]:
    """Overwrite pages as their owner's next use would. Return the new bytes."""
    for page in pages:
        page.copy_from(b"\x5a" * NBYTES)
    return [page.tobytes() for page in pages]


class TestFutures:
    def test_pages_are_saved_looked_up_and_loaded(self, open_store: OpenStore) -> None:
        store, pages = open_store(), empty(3)
        saved = store.begin_save([transfer(filled(2))]).result(20)
        found = store.begin_lookup([(TARGET, HASHES[:3]), (DRAFT, HASHES[:1])]).result(20)
        loaded = store.begin_load([transfer(pages)]).result(20)

        assert [[OK, OK]] == saved.verdicts
        assert [[OK, OK, Verdict.MISS], [Verdict.MISS]] == found
        assert [[OK, OK, Verdict.MISS]] == loaded.verdicts
        assert [bytes_of(1), bytes_of(2)] == [page.tobytes() for page in pages[:2]]

    def test_a_mistake_is_the_futures(self, open_store: OpenStore) -> None:
        store = open_store()
        for begun in (
            store.begin_load([transfer(empty(1), ["no hash"])]),
            store.begin_save([transfer(filled(1), HASHES[:2])]),
            store.begin_lookup([(TARGET, ["no hash"])]),
        ):
            assert isinstance(begun.exception(20), ValueError)

    def test_a_late_load_is_done_at_its_deadline_and_touches_nothing_later(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate, pages = open_store(), Gate(), empty(2)
        store.save([transfer(filled(2))])
        storage.hooks["batch_get"] = gate
        with ends_in(5):
            outcome = store.begin_load([transfer(pages)], timeout_s=0.2).result(20)
        expected = used_again(pages)
        gate.open()
        wait_until(lambda: not store.private_nbytes()[1])

        assert [[TIMEOUT, TIMEOUT]] == outcome.verdicts
        assert expected == [page.tobytes() for page in pages]

    def test_with_memory_that_is_always_lent_a_late_load_waits_for_the_storage(self) -> None:
        storage, gate = HookedStorage(Capabilities(scatter_gather=True, parallelism=2)), Gate()
        storage.hooks["batch_get"] = gate
        with PageStore(storage, PageStoreSettings(lend_memory="always")) as store:
            begun = store.begin_load([transfer(empty(1))], timeout_s=0.05)
            assert gate.entered.wait(20)
            with pytest.raises(TimeoutError):
                begun.result(0.3)
            gate.open()

            assert [[Verdict.MISS]] == begun.result(20).verdicts

    def test_a_future_cannot_be_canceled(self, open_store: OpenStore) -> None:
        begun = open_store().begin_load([transfer(empty(1))])

        assert not begun.cancel()
        assert [[Verdict.MISS]] == begun.result(20).verdicts

    def test_wrong_pages_are_deleted_before_the_future_is_done(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store = open_store()
        framed = store.framed(TARGET)
        (page,) = filled(1)
        storage.inner.open_space(framed)
        wrong = Page(bytes(framed.frame_nbytes), *page.segments)
        storage.inner.batch_set(framed, HASHES[:1], [wrong])

        assert [[Verdict.CORRUPT]] == store.begin_load([transfer(empty(1))]).result(20).verdicts
        assert [False] == storage.inner.batch_exists(framed, HASHES[:1])


class TestOrder:
    def test_one_thread_runs_all_calls(self, storage: HookedStorage, open_store: OpenStore) -> None:
        store, gate = open_store(timeout_s=60, private_nbytes=1 << 24), Gate()
        storage.hooks["batch_get"] = gate
        before = threading.active_count()
        begun = [store.begin_load([transfer(empty(1))]) for _ in range(50)]
        assert gate.entered.wait(20)

        assert before + 1 == threading.active_count()
        gate.open()
        assert {Verdict.MISS} == {each.result(20).verdicts[0][0] for each in begun}

    def test_a_lookup_comes_before_loads_that_wait(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(parallelism=1), Gate()
        storage.hooks["batch_get"] = gate
        loads = [store.begin_load([transfer(empty(1))]) for _ in range(20)]
        assert gate.entered.wait(20)
        lookup = store.begin_lookup([(TARGET, HASHES[:1])])
        reads = store._lanes.get().reads
        wait_until(lambda: reads._executor.waiting_count == 20)
        gate.open()

        assert [[Verdict.MISS]] == lookup.result(20)
        assert {0} == {each.result(20).arrived() for each in loads}
        assert ["batch_get", "batch_exists"] == [name for name, _ in storage.batches[:2]]

    def test_saves_are_moved_two_at_a_time(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(parallelism=4), Gate()
        storage.hooks["batch_set"] = gate
        begun = [store.begin_save([transfer(filled(1))]) for _ in range(4)]
        wait_until(lambda: storage.calls["batch_set"] == 2)

        assert [True, True, False, False] == [each.running() for each in begun]
        gate.open()
        assert [1] * 4 == [each.result(20).arrived() for each in begun]

    def test_a_save_waits_for_loads_that_wait_for_a_thread(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(parallelism=1), Gate()
        storage.hooks["batch_get"] = gate
        loads = [store.begin_load([transfer(empty(1))]) for _ in range(2)]
        assert gate.entered.wait(20)
        save = store.begin_save([transfer(filled(1))])
        lookup = store.begin_lookup([(TARGET, HASHES[:1])])

        assert not save.running()
        gate.open()
        assert [0, 0, 1] == [each.result(20).arrived() for each in (*loads, save)]
        assert lookup.result(20)

    def test_a_save_that_is_held_back_says_nothing_about_the_store(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(parallelism=1, breaker_failures=1, write_timeout_s=0.2), Gate()
        storage.hooks["batch_get"] = gate
        loads = [store.begin_load([transfer(empty(1))]) for _ in range(2)]
        assert gate.entered.wait(20)

        assert [[TIMEOUT]] == store.begin_save([transfer(filled(1))]).result(20).verdicts
        assert "closed" == store.breaker.writes.state
        gate.open()
        assert [[[Verdict.MISS]]] * 2 == [each.result(20).verdicts for each in loads]

    def test_a_key_space_with_a_frame_fails_its_own_lookup_only(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(), Gate()
        storage.hooks["batch_exists"] = gate
        asked = [store.begin_lookup([(TARGET, HASHES[:1])]) for _ in range(3)]
        wrong = store.begin_lookup([(store.framed(TARGET), HASHES[:1])])

        assert isinstance(wrong.exception(20), ValueError)
        gate.open()
        assert [[[Verdict.MISS]]] * 3 == [each.result(20) for each in asked]


class TestEnd:
    def test_lookups_that_wait_end_with_the_others(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(timeout_s=300), Gate()
        storage.hooks["batch_exists"] = gate
        asked = [store.begin_lookup([(TARGET, [page_hash])]) for page_hash in HASHES[:4]]
        assert gate.entered.wait(20)
        with ends_in(5):
            store.end_begun()
            answers = [each.result(20) for each in asked]
        gate.open()

        assert [[[TIMEOUT]]] * 4 == answers

    def test_calls_can_be_ended_before_their_deadlines(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(timeout_s=300), Gate()
        storage.hooks["batch_set"] = gate
        begun = [store.begin_save([transfer(filled(1))]) for _ in range(4)]
        assert gate.entered.wait(20)
        with ends_in(5):
            store.end_begun()
            outcomes = [each.result(20).verdicts for each in begun]
        gate.open()

        assert [[[TIMEOUT]]] * 4 == outcomes

    def test_closing_the_store_ends_them_and_the_thread(
        self, storage: HookedStorage, open_store: OpenStore
    ) -> None:
        store, gate = open_store(timeout_s=300), Gate()
        storage.hooks["batch_get"] = gate
        begun = store.begin_load([transfer(empty(1))])
        assert gate.entered.wait(20)
        threading.Timer(0.2, gate.open).start()
        store.close()

        assert [[TIMEOUT]] == begun.result(20).verdicts
        assert not [each for each in threading.enumerate() if each.name == "hicache-calls"]

    def test_calls_after_close_are_done_at_once(self, open_store: OpenStore) -> None:
        store = open_store()
        store.begin_load([transfer(empty(1))]).result(20)
        store.close()
        verdict = [[Verdict.ERROR]]

        assert verdict == store.begin_load([transfer(empty(1))]).result(20).verdicts
        assert verdict == store.begin_save([transfer(filled(1))]).result(20).verdicts
        assert verdict == store.begin_lookup([(TARGET, HASHES[:1])]).result(20)

    def test_a_forked_child_opens_key_spaces_of_its_own(self, tmp_path: Path) -> None:
        """A thread of the parent may hold the lock of the open key spaces while the parent is forked."""
        with FileStorage.from_config({"path": str(tmp_path)}) as files, PageStore(files) as store:
            lock = store._lanes.get().spaces._lock
            lock.acquire()
            child = os.fork()
            if not child:
                try:
                    saved = store.save([transfer(filled(1))], timeout_s=10).arrived()
                except BaseException:  # noqa: BLE001 - as below
                    os._exit(2)
                os._exit(saved != 1)
            lock.release()

            assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def test_a_forked_child_begins_calls_of_its_own(self, tmp_path: Path) -> None:
        with FileStorage.from_config({"path": str(tmp_path)}) as files, PageStore(files) as store:
            assert 1 == store.begin_save([transfer(filled(1))]).result(20).arrived()
            child = os.fork()
            if not child:
                try:
                    loaded = store.begin_load([transfer(empty(1))]).result(20).arrived()
                except BaseException:  # noqa: BLE001 - the child must not go on with the tests
                    os._exit(2)
                os._exit(loaded != 1)

            assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestCalls:
    def test_a_call_goes_on_when_its_storage_calls_have_ended(self) -> None:
        first: Future[int] = Future()
        second: Future[int] = Future()

        def call() -> Call[int]:
            yield Waiting([first], Deadline(20))
            yield Waiting([second], Deadline(20))
            return first.result() + second.result()

        calls = Calls()
        begun = calls.begin(call(), Deadline(20))
        first.set_result(1)
        second.set_result(2)

        assert 3 == begun.result(20)
        calls.close()

    def test_storage_calls_that_have_not_begun_are_canceled_at_the_deadline(self) -> None:
        waiting: Future[None] = Future()

        def call() -> Call[bool]:
            yield Waiting([waiting], Deadline(0.01))
            return waiting.cancelled()

        calls = Calls()
        assert calls.begin(call(), Deadline(20)).result(20)
        assert finish(call())
        calls.close()

    def test_an_interrupt_closes_a_call_that_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed: list[bool] = []

        def call() -> Call[None]:
            try:
                yield Waiting([Future()], Deadline(20))
            finally:
                closed.append(True)

        def interrupt(_: Waiting) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Waiting, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finish(call())

        assert [True] == closed
