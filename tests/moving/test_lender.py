"""Moves of an engine's pages: which memory a store gets, and what a call keeps that ends too late."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from clocks import ends_in
from framed import DRAFT, HASHES, TARGET, bytes_of, empty, filled, transfer
from hicache_backends.memory import MemoryStorage
from job_runners import SPACE, batch, contents, target
from stores import HookedStorage

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.shared_resource import CallGate
from hicache_storage.moving import lender
from hicache_storage.moving.buffers import Buffer, Buffers
from hicache_storage.moving.lender import (
    CopiedPages,
    LentPages,
    PageBatch,
    ParallelCopies,
    RevocablePages,
)
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, frame
from hicache_storage.page_store.results import Outcome, Transfer, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_storage.moving.lender import Batches, Lender
    from hicache_storage.page_store.counters import Direction

WAYS: list[type[Lender]] = [CopiedPages, LentPages, RevocablePages]
OK, MISS = Verdict.OK, Verdict.MISS


class _Recording(PageStore):
    """A page store that keeps the last transfers, and may fail as if a storage call had begun."""

    transfers: Any = None
    error: Exception | None = None

    def save(self, transfers: Any, **options: Any) -> Outcome:
        if self.error is not None:
            raise self.error
        self.transfers = transfers
        return super().save(transfers, **options)


class _Engine:
    """Both directions of an engine, over one page store."""

    def __init__(self, store: _Recording, way: type[Lender], limit_nbytes: int | None) -> None:
        self.store = store
        for space in (SPACE, TARGET, DRAFT):
            store.open_space(space)
        self.gate = CallGate()
        self.saves = way(
            store, "save", Buffers(store, limit_nbytes), engine=self.gate, settle_s=0.1
        )
        self.loads = way(store, "load", Buffers(store, limit_nbytes), engine=self.gate)

    def save(self, batches: Batches) -> list[list[Verdict]]:
        return _verdicts(self.saves.move(batches, Deadline(10)))

    def load(self, batches: Batches) -> list[list[Verdict]]:
        return _verdicts(self.loads.move(batches, Deadline(10)))


def _verdicts(outcome: Outcome | None) -> list[list[Verdict]]:
    assert outcome is not None
    outcome.settled.result(10)
    return outcome.verdicts


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> type[Lender]:
    way: type[Lender] = request.param
    return way


@pytest.fixture
def store() -> Generator[_Recording]:
    with _Recording(MemoryStorage.from_config({})) as store:
        yield store


@pytest.fixture
def engine(store: _Recording, way: type[Lender]) -> _Engine:
    return _Engine(store, way, 1 << 20)


@pytest.mark.parametrize("limit_nbytes", [None, 1 << 20])
def test_pages_that_were_saved_can_be_loaded(
    store: _Recording, way: type[Lender], limit_nbytes: int | None
) -> None:
    engine = _Engine(store, way, limit_nbytes)
    pages = target(range(4))

    assert [[OK] * 3] == engine.save([batch(range(3))])
    assert [[OK, OK, OK, MISS]] == engine.load([pages])
    assert contents(batch(range(3))) == contents(pages)[:3]


def test_pages_with_headers_of_the_engine_can_be_saved_and_loaded(engine: _Engine) -> None:
    pages = empty(3)

    assert [[OK] * 3] == engine.save([transfer(filled(3))])
    assert [[OK] * 3] == engine.load([transfer(pages)])
    assert [bytes_of(1), bytes_of(2), bytes_of(3)] == [one.payload.tobytes() for one in pages]


def test_only_complete_pages_are_copied_back(store: _Recording) -> None:
    engine = _Engine(store, CopiedPages, 1 << 20)
    engine.save([transfer(filled(2))])
    engine.save([Transfer(DRAFT, HASHES[1:2], filled(1))])
    parts = empty(2), empty(2)

    engine.load([Transfer(TARGET, HASHES[:2], parts[0]), Transfer(DRAFT, HASHES[:2], parts[1])])

    blank = bytes_of(0)
    assert [[blank, bytes_of(2)], [blank, bytes_of(1)]] == [
        [one.payload.tobytes() for one in part] for part in parts
    ]


def test_a_store_of_lent_pages_gets_the_headers_of_the_engine(store: _Recording) -> None:
    engine = _Engine(store, LentPages, 1 << 20)
    given = transfer(filled(3))
    engine.save([given])

    assert [given] == store.transfers
    assert not engine.saves.buffers.nbytes


@pytest.mark.parametrize("way", [LentPages, RevocablePages])
def test_a_store_that_is_lent_pages_gets_no_copy(store: _Recording, way: type[Lender]) -> None:
    engine, pages = _Engine(store, way, 1 << 20), batch(range(2))
    engine.save([pages])

    assert [page.segments for page in pages.pages] == [
        page.payload.segments for page in store.transfers[0].pages
    ]


def test_revocable_pages_are_revoked_when_a_move_has_returned(store: _Recording) -> None:
    engine = _Engine(store, RevocablePages, 1 << 20)
    engine.save([batch(range(2))])

    (revocable,) = {page.stored.revocable for page in store.transfers[0].pages}
    assert not revocable.enter()


def test_memory_is_free_again_after_a_move(engine: _Engine) -> None:
    assert [[OK] * 3] == engine.save([batch(range(3))])
    assert 0 == engine.saves.buffers.used_nbytes < engine.saves.buffers.nbytes
    assert not engine.gate.calls


def test_a_move_after_the_memory_was_taken_back_is_not_tried(engine: _Engine) -> None:
    engine.gate.close()

    assert [[Verdict.UNAVAILABLE]] == engine.save([batch([0])])
    assert 0 == engine.saves.buffers.used_nbytes


def test_a_copied_page_is_hashed_once(store: _Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "payload_checksums", None)  # a second hash would fail

    assert [[OK] * 3] == _Engine(store, CopiedPages, 1 << 20).save([batch(range(3))])


def test_the_buffers_of_a_key_space_have_one_size(engine: _Engine) -> None:
    engine.save([batch([0])])
    nbytes = engine.saves.buffers.nbytes
    engine.save([batch(range(7))])

    assert nbytes == engine.saves.buffers.nbytes


def test_a_move_without_a_buffer_in_time_is_not_tried(engine: _Engine) -> None:
    engine.saves.buffers.acquire(1 << 20, 0)

    assert engine.saves.move([batch([0])], Deadline(0)) is None


def test_a_call_whose_end_is_unknown_keeps_its_buffer(engine: _Engine) -> None:
    engine.store.error = RuntimeError("in the middle of a call")
    with pytest.raises(RuntimeError):
        engine.save([batch([0])])

    assert engine.saves.buffers.used_nbytes > 0
    assert not engine.gate.calls  # a bounded store has ended its calls by now


def test_a_call_that_the_page_store_refused_keeps_no_buffer(engine: _Engine) -> None:
    engine.store.error = ValueError("a key space is not open")
    with pytest.raises(ValueError, match="not open"):
        engine.save([batch([0])])

    assert (0, 0) == (engine.saves.buffers.used_nbytes, engine.gate.calls)


def test_a_malformed_page_keeps_no_buffer(engine: _Engine) -> None:
    malformed = PageBatch(SPACE, HASHES[:1], [Page(bytearray(1))])
    with pytest.raises(ValueError, match=r"bytes|fit together"):
        engine.save([malformed])

    assert (0, 0) == (engine.saves.buffers.used_nbytes, engine.gate.calls)


def test_an_eighth_of_the_limit_is_enough_for_a_move(engine: _Engine) -> None:
    assert 16 == engine.saves.max_pages(SPACE)


class TestParts:
    """Large moves of `ParallelCopies`, in parts of two pages."""

    @pytest.fixture
    def storage(self) -> HookedStorage:
        return HookedStorage()

    @pytest.fixture
    def make(
        self, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
    ) -> Generator[Callable[[Direction], ParallelCopies]]:
        monkeypatch.setattr(lender, "_PART_NBYTES", 2 * SPACE.page_nbytes)
        with PageStore(storage, PageStoreSettings(timeout_s=1)) as store, ExitStack() as stack:
            store.open_space(SPACE)

            def make(direction: Direction) -> ParallelCopies:
                made = ParallelCopies(store, direction, Buffers(store))
                stack.callback(made.close)
                return made

            yield make

    def test_pages_are_saved_and_loaded_in_parts(
        self, storage: HookedStorage, make: Callable[[Direction], ParallelCopies]
    ) -> None:
        pages = target(range(7))

        assert [[OK] * 6] == _verdicts(make("save").move([batch(range(6))]))
        assert [[OK] * 6 + [MISS]] == _verdicts(make("load").move([pages]))
        assert contents(batch(range(6))) == contents(pages)[:6]
        assert ("batch_set", 6) not in storage.batches
        assert ("batch_get", 7) not in storage.batches

    def test_pages_larger_than_a_part_are_moved_alone(
        self,
        storage: HookedStorage,
        make: Callable[[Direction], ParallelCopies],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(lender, "_PART_NBYTES", 1)

        assert [[OK] * 3] == _verdicts(make("save").move([batch(range(3))]))
        assert [("batch_set", 1)] * 3 == storage.batches

    def test_a_part_without_a_buffer_is_unavailable(
        self, make: Callable[[Direction], ParallelCopies], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saves = make("save")
        acquire, calls = saves.buffers.acquire, iter(range(9))

        def acquire_all_but_one(nbytes: int, timeout_s: float) -> Buffer | None:
            return None if next(calls) == 1 else acquire(nbytes, timeout_s)

        monkeypatch.setattr(saves.buffers, "acquire", acquire_all_but_one)
        (verdicts,) = _verdicts(saves.move([batch(range(6))]))

        assert 2 == verdicts.count(Verdict.UNAVAILABLE)
        assert 4 == verdicts.count(OK)

    def test_a_store_that_hangs_changes_no_page_after_the_deadline(
        self, storage: HookedStorage, make: Callable[[Direction], ParallelCopies]
    ) -> None:
        make("save").move([batch(range(6))])
        go_on, ended = threading.Event(), threading.Semaphore(0)

        def hang(answer: Callable[[], Any]) -> Any:
            go_on.wait(10)
            found = answer()
            ended.release()
            return found

        storage.hooks["batch_get"] = hang
        pages, loads = target(range(6)), make("load")
        before = contents(pages)
        with ends_in(3):
            (verdicts,) = _verdicts(loads.move([pages]))
        assert OK not in verdicts

        running = storage.calls["batch_get"]
        go_on.set()
        for _ in range(running):
            assert ended.acquire(timeout=5)
        assert before == contents(pages)

    def test_an_error_of_one_part_is_raised_when_all_have_ended(
        self, storage: HookedStorage, make: Callable[[Direction], ParallelCopies]
    ) -> None:
        wrong = batch(range(6))
        malformed = PageBatch(SPACE, wrong.hashes, [Page(bytearray(1)), *wrong.pages[1:]])
        with pytest.raises(ValueError, match=r"bytes|fit together"):
            make("save").move([malformed])

        assert 4 == sum(pages for _, pages in storage.batches)
