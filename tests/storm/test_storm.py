"""Short storms over real stores, and storms that find what is wrong with a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from storm.storm import rage
from storm.worlds import WORLDS, World

from hicache_storage.registry import open_storage
from hicache_storage.testing import Fault, FaultyStorage, Odds

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage.storage import HiCacheStorage

pytestmark = pytest.mark.no_cover
KILLS = 12


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("file", KILLS),
        ("redis", KILLS),
        *(pytest.param(name, 1000, marks=pytest.mark.long) for name in WORLDS),
    ],
)
@pytest.mark.timeout(3600)
def test_kills_cost_nothing_that_was_promised(name: str, kills: int, tmp_path: Path) -> None:
    with WORLDS[name](tmp_path) as world:
        storm = rage(world, kills=kills, seed=kills)

    assert [] == storm.findings
    assert storm.figures["process kills"] + storm.figures["server kills"] >= kills
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
    def opened() -> HiCacheStorage:
        inner = open_storage("file", {"path": str(tmp_path / "pages")})
        return FaultyStorage(inner, [Odds(operation, fault, 0.2)])

    storm = rage(World(opened), kills=200, seed=0)

    assert storm.findings
    assert finding in storm.findings[0]


def test_a_storm_finds_no_loss_where_the_store_may_evict(tmp_path: Path) -> None:
    def opened() -> HiCacheStorage:
        inner = open_storage("file", {"path": str(tmp_path / "pages")})
        return FaultyStorage(inner, [Odds("batch_set", Fault.LIE, 0.2)])

    assert [] == rage(World(opened, retains=False), kills=KILLS, seed=0).findings
