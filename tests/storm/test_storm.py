"""Short storms over real stores, and storms that must find the fault of a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from storm.hazards import FullDisk, Isolation, Partition, Pause
from storm.progress import Progress
from storm.storm import go_on, rage
from storm.world import World
from storm.worlds import WORLDS

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Odds, WrapperStorage

pytestmark = [pytest.mark.no_cover, pytest.mark.timeout(300)]
KILLS = 12


class HastyStorage(WrapperStorage):
    """A storage that returns True for every set, whether or not the page was stored."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with suppress(StorageTimeout, StorageUnavailable):
            super().batch_set(space, hashes, pages)
        return [True] * len(hashes)


class ForgetfulStorage(WrapperStorage):
    """A storage of tiers that deletes pages from the first one only."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return next(iter(self.inner.parts().values())).batch_delete(space, hashes)


class AgeingStorage(WrapperStorage):
    """A storage that drops pages once the wall clock is more than an hour after its creation."""

    def __init__(self, inner: HiCacheStorage, made_s: float) -> None:
        super().__init__(inner)
        self._made_s = made_s

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if time.time() - self._made_s > 3600:
            return [True] * len(hashes)
        return super().batch_set(space, hashes, pages)


def on_file(root: Path) -> HiCacheStorage:
    return open_storage("file", {"path": str(root)})


def faulty(root: Path, odds: Odds, hang_s: float | None = None) -> HiCacheStorage:
    return FaultyStorage(on_file(root), [odds], hang_s=hang_s)


@contextmanager
def only(name: str, hazard: type, directory: Path) -> Generator[World]:
    """Yield a world with only one hazard."""
    with WORLDS[name](directory) as world:
        yield replace(
            world, hazards=tuple(each for each in world.hazards if isinstance(each, hazard))
        )


def hasty(opened: Callable[[], HiCacheStorage]) -> HiCacheStorage:
    return HastyStorage(opened())


def forgetful(opened: Callable[[], HiCacheStorage]) -> HiCacheStorage:
    return ForgetfulStorage(opened())


def ageing(root: Path, made_s: float) -> HiCacheStorage:
    return AgeingStorage(on_file(root), made_s)


def careless(root: Path) -> HiCacheStorage:
    """Return a storage that leaves a file behind whenever it is opened."""
    (root.parent / f"{time.monotonic_ns()}.tmp").touch()
    return on_file(root)


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("file", KILLS),
        ("file-cold", KILLS),
        ("file-disk", KILLS),
        ("fsspec", KILLS),
        ("redis", 2 * KILLS),
        pytest.param("encrypted-redis", KILLS, marks=pytest.mark.slow),
        pytest.param("hf3fs-redis", KILLS, marks=pytest.mark.slow),
        pytest.param("redis-cluster", 2 * KILLS, marks=pytest.mark.slow),
        pytest.param("redis-disk", KILLS, marks=pytest.mark.slow),
        pytest.param("s3-disk", KILLS, marks=pytest.mark.slow),
        pytest.param("tiered-disk", KILLS, marks=pytest.mark.slow),
        pytest.param("tiered-back-disk", KILLS, marks=pytest.mark.slow),
        pytest.param("tiered-ruined-disk", KILLS, marks=pytest.mark.slow),
        pytest.param("striped-disk", KILLS, marks=pytest.mark.slow),
        *(
            pytest.param(name, 1000, marks=pytest.mark.long)
            for name in WORLDS
            if name != "mooncake"  # `over_mooncake`
        ),
    ],
)
@pytest.mark.timeout(3600)
def test_kills_cost_nothing_that_was_promised(name: str, kills: int, tmp_path: Path) -> None:
    with WORLDS[name](tmp_path) as world:
        storm = rage(world, kills=kills, seed=kills)

    assert [] == storm.findings
    assert storm.kills >= kills
    assert storm.figures["calls"] > kills
    assert storm.figures["pages read"] > 0


@pytest.mark.parametrize(
    ("operation", "fault", "finding"),
    [
        ("batch_set", Fault.LIE, "was accepted, and is lost"),
        ("batch_delete", Fault.LIE, "is there after its delete"),
        ("batch_get", Fault.FLIP, "has wrong bytes"),
        ("batch_set", Fault.TEAR, "has wrong bytes"),
    ],
)
def test_a_storm_finds(operation: str, fault: Fault, finding: str, tmp_path: Path) -> None:
    storm = rage(
        World(open=partial(faulty, tmp_path / "pages", Odds(operation, fault, 0.2))),
        kills=200,
        seed=0,
    )

    assert storm.findings
    assert finding in storm.findings[0]


@pytest.mark.parametrize("operation", ["batch_get", "batch_set"])
def test_a_storm_finds_a_call_that_is_cut_off_after_its_limit(
    operation: str, tmp_path: Path
) -> None:
    hangs = Odds(operation, Fault.HANG, 0.9)
    world = World(open=partial(faulty, tmp_path / "pages", hangs, hang_s=0.5), limit_s=0.01)

    assert any(
        finding.startswith(f"{operation} took")
        for finding in rage(world, kills=200, seed=0).findings
    )


@pytest.mark.parametrize("hazard", [Pause, Partition])
def test_a_storm_finds_a_call_that_waits_for_its_server_beyond_its_limit(
    hazard: type, tmp_path: Path
) -> None:
    with only("redis", hazard, tmp_path) as world:
        storm = rage(replace(world, limit_s=0.2), kills=300, seed=0, hits=1.0)

    assert storm.findings
    assert " took " in storm.findings[0]


@pytest.mark.parametrize(
    ("name", "hazard"),
    [
        ("redis", Partition),
        pytest.param("redis-cluster", Isolation, marks=pytest.mark.slow),
        ("file-disk", FullDisk),
        pytest.param("redis-disk", FullDisk, marks=pytest.mark.slow),
        pytest.param("s3-disk", FullDisk, marks=pytest.mark.slow),
    ],
)
def test_a_storm_finds_pages_that_were_accepted_in_vain(
    name: str, hazard: type, tmp_path: Path
) -> None:
    with only(name, hazard, tmp_path) as world:
        storm = rage(replace(world, open=partial(hasty, world.open)), kills=300, seed=0, hits=1.0)

    assert storm.findings
    assert "was accepted, and is lost" in storm.findings[0]


@pytest.mark.slow
def test_a_storm_finds_pages_that_a_tier_keeps_after_their_delete(tmp_path: Path) -> None:
    with WORLDS["tiered-disk"](tmp_path) as world:
        storm = rage(replace(world, open=partial(forgetful, world.open)), kills=300, seed=0)

    assert storm.findings
    assert "is there after its delete" in storm.findings[0]


def test_a_storm_finds_pages_that_are_lost_when_a_clock_is_stepped(tmp_path: Path) -> None:
    world = World(open=partial(ageing, tmp_path / "pages", time.time()))

    storm = rage(world, kills=200, seed=0, stepped=1.0)

    assert storm.findings
    assert "was accepted, and is lost" in storm.findings[0]


def test_a_storm_finds_files_that_were_left_behind(tmp_path: Path) -> None:
    world = World(
        open=partial(careless, tmp_path / "pages"),
        strays=lambda: [path.name for path in tmp_path.glob("*.tmp")],
    )

    assert "was left behind" in rage(world, kills=200, seed=0).findings[0]


def test_a_storm_finds_no_loss_where_the_store_may_evict(tmp_path: Path) -> None:
    lies = Odds("batch_set", Fault.LIE, 0.2)
    world = World(open=partial(faulty, tmp_path / "pages", lies), retains=False)

    assert [] == rage(world, kills=KILLS, seed=0).findings


def test_a_storm_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    world = World(open=partial(on_file, tmp_path / "pages"))
    go_on(world, Progress.load(kept, 3), kills=3)
    other = World(open=partial(on_file, tmp_path / "other"))

    storm = go_on(other, Progress.load(kept, 3), kills=6)

    assert [] == storm.findings
    assert (6, 2) == (storm.kills, storm.figures["turns"])
