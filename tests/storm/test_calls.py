"""Some thousand calls with faults over real stores, and calls that must find a store's faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from storm import calls
from storm.calls import call
from storm.progress import Progress
from storm.world import World
from storm.worlds import WORLDS

from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Odds, WrapperStorage

pytestmark = pytest.mark.no_cover


class LeakyStorage(WrapperStorage):
    """A storage that leaves a thread behind."""

    def __init__(self, inner: HiCacheStorage, released: threading.Event) -> None:
        super().__init__(inner)
        threading.Thread(target=released.wait, daemon=True).start()


class FailingStorage(WrapperStorage):
    """A storage whose reads raise an error that the contract does not name."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        raise KeyError(hashes[0])


def world_of(wrap: Callable[[HiCacheStorage], HiCacheStorage], directory: Path) -> World:
    """Return a world of `file` with a wrapper."""

    def opened() -> HiCacheStorage:
        return wrap(open_storage("file", {"path": str(directory / "pages")}))

    return World(open=opened)


@pytest.fixture
def leaky(tmp_path: Path) -> Generator[World]:
    """Yield a world in which every opening leaves a thread behind until the end of the test."""
    released = threading.Event()
    yield world_of(partial(LeakyStorage, released=released), tmp_path)
    released.set()


def findings(world: World, count: int, plan: Sequence[Odds] = ()) -> list[str]:
    progress = Progress(seed=0)
    call(world, progress, calls=count, plan=plan)
    return progress.findings


@pytest.mark.parametrize("name", ["file", "redis", "s3"])
def test_faults_of_storages_and_networks_break_no_promise(name: str, tmp_path: Path) -> None:
    progress = Progress(seed=1)
    with WORLDS[name](tmp_path) as world:
        call(world, progress, calls=1000)

    assert [] == progress.findings
    assert 1000 == progress.figures["calls"]
    assert progress.figures["pages read"] > 0
    assert progress.figures["storage raise"] > 0


def test_a_round_that_leaves_a_thread_is_found(
    leaky: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "ROUND", 20)
    monkeypatch.setattr(calls, "_LEFT_LIMIT_S", 0.1)
    found = findings(leaky, 40)

    assert "left thread" in found[0]


def test_the_threads_that_a_library_starts_late_are_counted(
    leaky: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One late thread is allowed, so the second round may leave one, but the third round may not."""
    monkeypatch.setattr(calls, "ROUND", 20)
    monkeypatch.setattr(calls, "_LEFT_LIMIT_S", 0.1)
    progress = Progress(seed=0)
    call(replace(leaky, late_threads=1), progress, calls=100, plan=())

    (found,) = progress.findings
    assert "left thread" in found
    assert 3 == progress.figures["rounds"]


def test_what_the_first_round_of_a_process_leaves_is_no_finding(
    leaky: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LEFT_LIMIT_S", 0.1)
    progress = Progress(seed=0)
    progress.figures["rounds"] = 1  # of a process that has ended
    call(leaky, progress, calls=20)

    assert [] == progress.findings


def test_a_foreign_error_is_found(tmp_path: Path) -> None:
    assert "load ended with an error that the contract does not name" in findings(
        world_of(FailingStorage, tmp_path), 100
    )


def test_a_call_that_overruns_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", -0.45)
    delays = [Odds("batch_get", Fault.DELAY, 1.0)]

    assert any("load took" in each for each in findings(world_of(_same, tmp_path), 50, delays))


def test_wrong_bytes_are_found_where_nothing_checks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "PageStoreSettings", partial(PageStoreSettings, checksum="none"))

    def flipped(inner: HiCacheStorage) -> HiCacheStorage:
        return FaultyStorage(inner, [Odds("batch_set", Fault.FLIP, 0.3)])

    found = findings(world_of(flipped, tmp_path), 300)

    assert any("has wrong bytes" in each for each in found)


def test_calls_go_on_from_what_was_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    call(world_of(_same, tmp_path), Progress.load(kept, 7), calls=50)
    progress = Progress.load(kept, 7)

    assert 50 == progress.figures["calls"]

    call(world_of(_same, tmp_path), progress, calls=80)

    assert (80, 2) == (progress.figures["calls"], progress.figures["rounds"])


def test_another_seed_or_a_fresh_start_begins_anew(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    progress = Progress.load(kept, 7)
    progress.figures["calls"] = 9
    progress.save()

    assert 9 == Progress.load(kept, 7).figures["calls"]
    assert 0 == Progress.load(kept, 8).figures["calls"]
    assert 0 == Progress.load(kept, 7, fresh=True).figures["calls"]


def _same(inner: HiCacheStorage) -> HiCacheStorage:
    return inner
