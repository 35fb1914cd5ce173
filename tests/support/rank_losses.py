"""One rank of an engine whose stores lose different pages, and the leases that it gets."""

from __future__ import annotations

import random
from typing import Any

from engines import compute, content, engine_on, is_right, leaked, windowed
from pages import hash_of
from stores import HookedStorage

from hicache_storage.controller import CacheController, Lease, PartialHits, Ranks

PAGES = 12
_LOSSES = {"draft": 0.5, "swa": 0.1, "kv": 0.05}
"""For each pool, how likely a rank's store is to lose pages of it before a request."""


def serve_with_losses(rank: int, ranks: Ranks, requests: int, seed: int = 0) -> list[Any]:
    """Serve `requests`. Return the facts of each lease, which must be the same on all ranks."""
    own = random.Random(f"{seed} {rank}")
    shared = random.Random(seed)  # the choices that an engine makes for all of its ranks
    storage = HookedStorage()
    facts: list[Any] = []
    leases: list[Lease] = []
    pools = windowed(40, window_slots=20)
    how: dict[str, Any] = {"partial_hits": PartialHits.TAKE_TARGET, "ranks": ranks}
    with engine_on(storage, pools, **how) as engine:
        for number in range(requests):
            _lose(storage, own)
            if own.random() < 0.4:
                engine.cache.clear()
            if own.random() < 0.2:
                engine.drain(20)
            prompt = [hash_of(100 * shared.randrange(3) + page) for page in range(PAGES)]
            prompt = prompt[: shared.randrange(1, PAGES + 1)]
            lease = engine.prefetch(f"request {number}", prompt).result()
            assert is_right(lease)
            facts.append(_facts(lease))
            if shared.random() < 0.7:
                facts.append(_recompute_draft(engine, lease, shared))
            leases.append(lease)
            if len(leases) > shared.randrange(3):
                leases.pop(0).release()
            compute(engine, prompt[lease.pages :], timeout_s=0)
        for lease in leases:
            lease.release()
        engine.drain(20)
        assert "ranks_lost" not in engine.stats()
        assert not leaked(engine)
    return facts


def _lose(storage: HookedStorage, own: random.Random) -> None:
    for space in storage.inner.spaces():
        if own.random() < _LOSSES[space.pool]:
            stored = [info.page_hash for info in storage.inner.scan(space)]
            lost = own.sample(stored, min(len(stored), own.randrange(1, 4)))
            storage.inner.batch_delete(space, lost)


def _facts(lease: Lease) -> Any:
    coverage = [each.value for each in lease.coverage]
    return lease.pages, lease.verdict.value, coverage, lease.missing("draft"), lease.indices


def _recompute_draft(engine: CacheController, lease: Lease, shared: random.Random) -> Any:
    """Recompute some pages that the draft lacks. Return the claimed pages, and the filled ones."""
    draft = engine.cache.pools[engine.cache.pool_set.number("draft")]
    claimed = lease.claim("draft")
    chosen = [page for page in sorted(claimed) if shared.random() < 0.7]
    for page in chosen:
        page_hash = lease.entries[page].page_hash
        draft.host.page(claimed[page]).copy_from(content(draft, page_hash))
    lease.fill("draft", chosen)
    return sorted(claimed), chosen
