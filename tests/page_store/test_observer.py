from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from framed import DRAFT, HASHES, TARGET, empty, filled, transfer

from hicache_storage.errors import UnsupportedOperation
from hicache_storage.page_store import Observer, PageStore
from hicache_storage.page_store.lookup import PoolSpec
from hicache_storage.page_store.observer import (
    NO_ACTIVITY,
    Activity,
    Clearance,
    Deletion,
    Lookup,
    Move,
)
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from stores import HookedStorage

    from hicache_storage.page_store.observer import Attributes


class Recorder(Observer):
    """An observer that keeps all reports that it receives."""

    def __init__(self) -> None:
        self.reports: list[Lookup | Move | Deletion | Clearance] = []
        self.times_ns: list[int] = []

    def _add(self, report: Lookup | Move | Deletion | Clearance, began_ns: int) -> None:
        self.reports.append(report)
        self.times_ns.append(began_ns)

    def looked_up(self, lookup: Lookup, began_ns: int) -> None:
        self._add(lookup, began_ns)

    def moved(self, move: Move, began_ns: int) -> None:
        self._add(move, began_ns)

    def deleted(self, deletion: Deletion, began_ns: int) -> None:
        self._add(deletion, began_ns)

    def cleared(self, clearance: Clearance, began_ns: int) -> None:
        self._add(clearance, began_ns)


class Broken(Observer):
    """An observer whose methods raise."""

    def begin(self, name: str, attributes: Attributes) -> Activity:
        raise RuntimeError("broken")

    def moved(self, move: Move, began_ns: int) -> None:
        raise RuntimeError("broken")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def store(recorder: Recorder, storage: HookedStorage) -> Iterator[PageStore]:
    with PageStore(storage, observers=[recorder]) as opened:
        opened.open_space(TARGET)
        opened.open_space(DRAFT)
        yield opened


def test_a_save_and_a_load_are_reported_with_their_verdicts(
    store: PageStore, recorder: Recorder
) -> None:
    saved, loaded = transfer(filled(2)), transfer(empty(3))

    outcomes = [store.save([saved]), store.load([loaded])]

    assert [Move("save", [saved], outcomes[0]), Move("load", [loaded], outcomes[1])] == (
        recorder.reports
    )
    assert [[Verdict.OK, Verdict.OK, Verdict.MISS]] == outcomes[1].verdicts


def test_reports_have_the_times_at_which_the_calls_began(
    store: PageStore, recorder: Recorder
) -> None:
    store.save([transfer(filled(1))])
    store.load([transfer(empty(1))])

    assert 0 < recorder.times_ns[0] < recorder.times_ns[1]


def test_a_match_is_reported_with_the_answers_of_each_pool(
    store: PageStore, recorder: Recorder
) -> None:
    store.save([transfer(filled(2))])

    store.match(HASHES[:4], [PoolSpec(space=TARGET), PoolSpec(space=DRAFT)])

    lookup = recorder.reports[-1]
    assert isinstance(lookup, Lookup)
    assert [TARGET, DRAFT] == lookup.spaces
    assert [[True, True, False, False], [False, False, None, None]] == lookup.answers
    assert (0, [None, None]) == (lookup.prefix_pages, lookup.failures)


def test_a_presence_query_is_reported_without_a_prefix(
    store: PageStore, recorder: Recorder
) -> None:
    store.save([transfer(filled(1))])

    store.present(TARGET, HASHES[:2])

    assert Lookup([TARGET], HASHES[:2], [[True, False]], [None], None) == recorder.reports[-1]


def test_a_delete_is_reported_with_the_pages_that_are_gone(
    store: PageStore, recorder: Recorder, storage: HookedStorage
) -> None:
    storage.hooks["batch_delete"] = lambda answer: [True, False]

    assert store.delete(TARGET, HASHES[:2]) == 1

    assert Deletion(TARGET, HASHES[:2], HASHES[:1]) == recorder.reports[-1]


def test_a_clear_removes_and_reports_the_pages_of_one_key_space(
    store: PageStore, recorder: Recorder
) -> None:
    store.save([transfer(filled(3))])
    store.save([transfer(filled(1))])

    assert store.clear(TARGET) == 3

    assert Clearance(TARGET, 3) == recorder.reports[-1]
    assert [False] * 3 == store.present(TARGET, HASHES[:3])


def test_a_clear_that_failed_is_not_reported(
    store: PageStore, recorder: Recorder, storage: HookedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(space: object) -> int:
        raise UnsupportedOperation("this storage cannot list its pages")

    monkeypatch.setattr(storage, "clear", refuse)

    with pytest.raises(UnsupportedOperation):
        store.clear(TARGET)

    assert [] == recorder.reports


def test_an_observer_that_raises_changes_no_result_and_stops_no_other(
    recorder: Recorder, storage: HookedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with PageStore(storage, observers=[Broken(), recorder]) as store:
        store.open_space(TARGET)

        assert [[Verdict.OK]] == store.save([transfer(filled(1))]).verdicts

    assert len(recorder.reports) == 1
    assert "an observer of the page store failed" in caplog.text


def test_an_activity_is_of_the_first_observer_that_has_one(storage: HookedStorage) -> None:
    class Tracer(Observer):
        def begin(self, name: str, attributes: Attributes) -> Activity:
            return activity

    class Ended(Activity):
        def end(self, attributes: Attributes) -> None:
            ended.append(attributes)

    activity, ended = Ended(), list[object]()
    with PageStore(storage, observers=[Broken(), Recorder(), Tracer()]) as store:
        store.begin_activity("prefetch", {}).end({"pages": 1})

    assert [{"pages": 1}] == ended


def test_an_activity_that_raises_changes_nothing(
    storage: HookedStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Raising(Activity):
        def resume(self) -> AbstractContextManager[object]:
            raise RuntimeError("broken")

        def end(self, attributes: Attributes) -> None:
            raise RuntimeError("broken")

    class Tracer(Observer):
        def begin(self, name: str, attributes: Attributes) -> Activity:
            return Raising()

    with PageStore(storage, observers=[Tracer()]) as store:
        activity = store.begin_activity("prefetch", {})
        with activity.resume():
            store.open_space(TARGET)
        activity.end({})

    assert caplog.text.count("an observer of the page store failed") == 2


def test_without_observers_an_activity_does_nothing(storage: HookedStorage) -> None:
    with PageStore(storage) as store:
        activity = store.begin_activity("prefetch", {"pages": 1})

        assert NO_ACTIVITY is activity
        with activity.resume():
            activity.end({})
