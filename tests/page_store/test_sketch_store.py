"""The sketch of offered pages survives restarts if the store can hold it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage
from pages import hash_of, space
from servers import wait_until

from hicache_storage.keys import KeySpace
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.page_store.sketch_store import SketchStore
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Odds, Strike, WrapperStorage

PAGES = [hash_of(number) for number in range(100)]
SETTINGS = AdmissionSettings(second_use=True, remembered_pages=1000)


class _Restoring(Admission):
    """An admission that signals when the store has answered its request for a sketch.

    It is offered `early` before that answer, and `late` at once after it.
    """

    def __init__(self, early: Sequence[str] = (), late: Sequence[str] = ()) -> None:
        super().__init__(SETTINGS)
        self.restored = threading.Event()
        self._early, self._late = early, late

    def restore(self, dumps: Sequence[bytes]) -> tuple[int, list[tuple[int, int]]]:
        self.admit(self._early, 4096)
        found = super().restore(dumps)
        self.admit(self._late, 4096)
        self.restored.set()
        return found


@contextmanager
def kept(
    storage: HiCacheStorage,
    *,
    interval_s: float = 60,
    owner: KeySpace | None = None,
    early: Sequence[str] = (),
    late: Sequence[str] = (),
) -> Generator[Admission]:
    """Yield an admission with the sketch that the storage had, and save the sketch at the end."""
    admission = _Restoring(early, late)
    with PageStore(storage) as store:
        sketches = SketchStore(store, admission, owner or space(), interval_s=interval_s)
        sketches.start()
        assert admission.restored.wait(20)
        yield admission
        assert sketches.close(20)


def test_another_process_knows_the_offered_pages(tmp_path: Path) -> None:
    for expected in (False, True):
        storage = FileStorage.from_config({"path": str(tmp_path)})
        with kept(storage) as admission:
            assert [expected] * 100 == admission.admit(PAGES, 4096)
        storage.close()


def test_many_restarts_forget_nothing() -> None:
    storage = MemoryStorage.from_config({})
    for restart in range(10):
        with kept(storage) as admission:
            assert [True] * 10 * restart == admission.admit(PAGES[: 10 * restart], 4096)
            admission.admit(PAGES[10 * restart : 10 * restart + 10], 4096)


@pytest.mark.parametrize("moment", ["early", "late"])
def test_pages_that_are_offered_while_the_sketch_is_restored_are_saved(moment: str) -> None:
    storage = MemoryStorage.from_config({})
    with kept(storage) as admission:
        admission.admit(PAGES[:10], 4096)
    with kept(storage, early=PAGES[10:20] if moment == "early" else (), late=PAGES[20:30]):
        pass
    with kept(storage) as admission:
        assert [moment == "early"] * 10 + [True] * 10 == admission.admit(PAGES[10:30], 4096)


def test_the_sketch_is_saved_while_it_changes() -> None:
    storage = FaultyStorage(MemoryStorage.from_config({}))
    with kept(storage, interval_s=0.01) as admission:
        assert storage.calls["batch_set"] == 0
        admission.admit(PAGES[:1], 4096)
        wait_until(lambda: storage.calls["batch_set"] >= 1)
        admission.admit(PAGES[1:2], 4096)
        wait_until(lambda: storage.calls["batch_set"] >= 2)


def test_an_unchanged_sketch_is_not_saved() -> None:
    storage = FaultyStorage(MemoryStorage.from_config({}))
    with kept(storage) as admission:
        admission.admit(PAGES, 4096)
    saves = storage.calls["batch_set"]
    with kept(storage):
        pass

    assert (1, 1) == (saves, storage.calls["batch_set"])


def test_other_engines_have_other_sketches() -> None:
    storage = MemoryStorage.from_config({})
    with kept(storage) as admission:
        admission.admit(PAGES, 4096)
    with kept(storage, owner=space(model="another")) as admission:
        assert [False] * 100 == admission.admit(PAGES, 4096)


def test_a_sketch_that_was_damaged_is_lost_and_saved_again() -> None:
    inner = MemoryStorage.from_config({})
    with kept(FaultyStorage(inner, [Strike("batch_set", 0, Fault.FLIP)])) as admission:
        admission.admit(PAGES, 4096)
    for expected in (False, True):
        with kept(inner) as admission:
            assert [expected] * 100 == admission.admit(PAGES, 4096)


def test_a_save_that_fails_leaves_the_sketch_before() -> None:
    inner = MemoryStorage.from_config({})
    with kept(inner) as admission:
        admission.admit(PAGES[:50], 4096)
    with kept(FaultyStorage(inner, [Odds("batch_set", Fault.RAISE, 1)])) as admission:
        admission.admit(PAGES[50:], 4096)
    with kept(inner) as admission:
        assert [True] * 50 == admission.admit(PAGES[:50], 4096)


def test_a_store_that_is_down_costs_nothing_but_the_sketch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = FaultyStorage(MemoryStorage.from_config({}), [Odds("batch_get", Fault.RAISE, 1)])
    with kept(storage) as admission:
        assert [False] * 100 == admission.admit(PAGES, 4096)

    assert 0 == storage.calls["batch_set"]


class _Small(WrapperStorage):
    """A storage for pages of at most 1000 bytes."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage.from_config({}))
        self.narrow(max_page_nbytes=1000)


def test_a_store_of_small_pages_cannot_hold_the_sketch(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(SETTINGS)
    with PageStore(_Small()) as store:
        sketches = SketchStore(store, admission, space())
        sketches.start()
        wait_until(lambda: len(caplog.records) == 1)

        assert sketches.close(20)
    assert "a restart loses" in caplog.records[0].message
    assert logging.WARNING == caplog.records[0].levelno


def test_an_admission_without_a_memory_is_refused() -> None:
    with (
        PageStore(MemoryStorage.from_config({})) as store,
        pytest.raises(ValueError, match="second_use"),
    ):
        SketchStore(store, Admission(AdmissionSettings()), space())
