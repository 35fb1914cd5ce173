"""A soak of thousands of requests, which must leave no memory, slot or thread in use."""

from __future__ import annotations

from collections import Counter

import pytest
from engines import leaked
from hicache_conformance.tools.processes.resources import (
    ProcessResources,
    remaining_after,
    resident_nbytes,
)
from storm.soak_clients import (
    GROWTH_NBYTES,
    flapping_storage,
    missing_events,
    soaked,
    soaking_engine,
)


@pytest.mark.parametrize(
    "requests",
    [
        5_000,
        pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_a_soak_leaves_nothing_behind(requests: int) -> None:
    stores = [flapping_storage(seed) for seed in range(2)]
    seen: Counter[str] = Counter()
    before = ProcessResources.current()
    with soaking_engine() as engine:
        first, wrong = soaked(engine, requests // 5, stores, seen)  # caches reach their size
        assert not wrong
        warm_nbytes = resident_nbytes()
        rest, wrong = soaked(engine, requests - requests // 5, stores, seen)
        assert not wrong
        grown_nbytes = resident_nbytes() - warm_nbytes
        assert not leaked(engine)
        assert not missing_events(engine, seen)
        done = engine.stats()

    assert not remaining_after(before, 20)
    assert grown_nbytes < GROWTH_NBYTES
    assert done["requests"] + done["cancelled_requests"] == first + rest
    assert "internal_errors" not in done
