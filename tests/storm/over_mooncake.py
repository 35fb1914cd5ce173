"""A short storm over a Mooncake cluster on two hosts, and a storm that must find wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from storm.storm import rage
from storm.worlds import WORLDS

from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import Fault, FaultyStorage, Odds


@pytest.mark.parametrize(
    "kills",
    [12, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])],
)
def test_kills_cost_nothing_that_was_promised(kills: int, tmp_path: Path) -> None:
    with WORLDS["mooncake"](tmp_path) as world:
        storm = rage(world, kills=kills, seed=1)

    assert [] == storm.findings
    assert storm.figures["pages read"] > 0


def flipping(opened: Callable[[], HiCacheStorage]) -> HiCacheStorage:
    return FaultyStorage(opened(), [Odds("batch_get", Fault.FLIP, 0.2)])


def test_a_storm_finds_wrong_bytes(tmp_path: Path) -> None:
    with WORLDS["mooncake"](tmp_path) as world:
        storm = rage(replace(world, open=partial(flipping, world.open)), kills=100, seed=0)

    assert storm.findings
    assert "has wrong bytes" in storm.findings[0]
