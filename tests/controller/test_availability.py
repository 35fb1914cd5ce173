"""The longest prefix that L3 has in all pools, which is looked up within one timeout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from clocks import Clock
from engines import DRAFT_SHAPE, PROMPT, TARGET_SHAPE, cache_pool, compute, engine_on
from stores import HookedStorage

from hicache_storage.controller import CachePool, PartialHits
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import PageStore
from hicache_storage.page_store.results import Match


class _SlowOnDrafts(HookedStorage):
    """A storage that takes 15 s for each of its first two lookups of optional pools."""

    clock: Clock | None = None
    slow = 2

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if self.clock is not None and space.pool != "kv" and self.slow:
            self.slow -= 1
            self.clock.now_s += 15
        return super().batch_exists(space, hashes)


def many_drafts() -> list[CachePool]:
    drafts = [cache_pool(f"draft-{n}", DRAFT_SHAPE, required=False) for n in range(5)]
    return [cache_pool("kv", TARGET_SHAPE), *drafts]


def test_optional_pools_are_looked_up_within_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools share one timeout, after which the target is used."""
    real, timeouts_s = PageStore.match, list[float]()

    def match(*args: Any, timeout_s: float, **options: Any) -> Match:
        timeouts_s.append(timeout_s)
        return real(*args, timeout_s=timeout_s, **options)

    storage = _SlowOnDrafts()
    with engine_on(storage, many_drafts()) as engine:
        compute(engine, PROMPT[:4])
        assert engine.drain(20)
    taking = PartialHits.TAKE_TARGET
    storage.clock = Clock(monkeypatch)
    monkeypatch.setattr(PageStore, "match", match)
    with (
        engine_on(storage, many_drafts(), timeout_s=20, partial_hits=taking) as engine,
        engine.prefetch("r", PROMPT[:4]).result() as lease,
    ):
        assert lease.pages == 4
    assert timeouts_s == [20, 20, 5, 0, 0, 0]
