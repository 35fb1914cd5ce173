"""The longest prefix that L3 has in all pools, which is looked up within one timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engines import DRAFT_SHAPE, PROMPT, TARGET_SHAPE, cache_pool, compute, engine_on
from stores import Gate, HookedStorage

from hicache_storage.controller import CachePool, PartialHits
from hicache_storage.keys import KeySpace


class _HangsOnDrafts(HookedStorage):
    """A storage whose lookups of optional pools hang."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if space.pool == "kv":
            return super().batch_exists(space, hashes)
        answers: list[bool] = self.gate(
            lambda: super(_HangsOnDrafts, self).batch_exists(space, hashes)
        )
        return answers


def many_drafts() -> list[CachePool]:
    drafts = [cache_pool(f"draft-{n}", DRAFT_SHAPE, required=False) for n in range(10)]
    return [cache_pool("kv", TARGET_SHAPE), *drafts]


def test_optional_pools_are_looked_up_within_one_timeout() -> None:
    """The pools share one timeout, after which the target is used."""
    storage = _HangsOnDrafts()
    with engine_on(storage, many_drafts()) as engine:
        compute(engine, PROMPT[:4])
        assert engine.drain(20)
    taking = PartialHits.TAKE_TARGET
    with engine_on(storage, many_drafts(), timeout_s=3, partial_hits=taking) as engine:
        began_s = time.monotonic()
        with engine.prefetch("r", PROMPT[:4]).result() as lease:
            took_s = time.monotonic() - began_s
            assert lease.pages == 4
        storage.gate.open()
    assert took_s < 20  # 30 s, if each of the 10 were given its 3 seconds
