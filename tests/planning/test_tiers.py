"""The sizes of L2 and L3 that each block needs for a hit, compared with two LRU lists of blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest

from hicache_storage.controller_settings import WritePolicy
from hicache_storage.planning.accesses import Accesses
from hicache_storage.planning.stack_distances import NEVER
from hicache_storage.planning.tiers import HostTier, StorageTier
from hicache_storage.replay.trace import BLOCK_TOKENS, InfiniteCache, Request, synthetic_trace

_THROUGH = WritePolicy.WRITE_THROUGH


def _simulated(
    requests: Sequence[Request], host_blocks: int, storage_blocks: int
) -> tuple[int, int]:
    """Return the hits of L2 and of L3 with write-through. A block's id stands for its whole prefix."""
    host: OrderedDict[int, None] = OrderedDict()
    storage: OrderedDict[int, None] = OrderedDict()
    seen: set[int] = set()
    hits = [0, 0]
    for request in requests:
        blocks = request.blocks
        in_host, in_storage = set(host) & set(blocks), set(storage) & set(blocks)
        found = next(
            (n for n, block in enumerate(blocks) if block not in in_host | in_storage), len(blocks)
        )
        hits[0] += sum(block in in_host for block in blocks[:found])
        hits[1] += sum(block not in in_host for block in blocks[:found])
        known = [block for block in blocks if block in seen]
        new = [block for block in blocks if block not in seen]
        for block in (*reversed(known), *reversed(new)):
            _use(host, block)
            if block not in in_host:
                _use(storage, block)
        for lru, size in ((host, host_blocks), (storage, storage_blocks)):
            while len(lru) > size:
                lru.popitem(last=False)
        seen.update(blocks)
    return hits[0], hits[1]


def _use(lru: OrderedDict[int, None], block: int) -> None:
    lru[block] = None
    lru.move_to_end(block)


def _requests(*prompts: tuple[int, ...]) -> list[Request]:
    return [
        Request(float(number), len(blocks) * BLOCK_TOKENS, 1, blocks)
        for number, blocks in enumerate(prompts)
    ]


def _tier(requests: Sequence[Request], host_blocks: int, policy: WritePolicy) -> StorageTier:
    return StorageTier.of(HostTier.of(Accesses.of(requests)), host_blocks, policy)


@pytest.mark.parametrize("host_blocks", [120, 200, 400])
@pytest.mark.parametrize("storage_blocks", [150, 500, 2000])
def test_hits_are_those_of_two_lru_lists(host_blocks: int, storage_blocks: int) -> None:
    requests = synthetic_trace(2, conversations=60)

    tier = _tier(requests, host_blocks, _THROUGH)

    reads = int(tier.reads(storage_blocks).sum())
    in_host = int(tier.hits(storage_blocks).sum()) - reads
    assert _simulated(requests, host_blocks, storage_blocks) == (in_host, reads)


def test_without_a_limit_hits_are_those_of_the_infinite_cache() -> None:
    requests = synthetic_trace(2, conversations=60)
    infinite = InfiniteCache()
    ideal = sum(infinite.hits(request) for request in requests)

    host = HostTier.of(Accesses.of(requests))

    assert ideal == int((host.needs_alone < NEVER).sum())
    assert ideal == int(_tier(requests, 100, _THROUGH).hits(NEVER - 1).sum())


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_larger_l3_hits_no_less(policy: WritePolicy) -> None:
    tier = _tier(synthetic_trace(2, conversations=60), 150, policy)

    hits = [int(tier.hits(size).sum()) for size in (0, 200, 400, 800, 1600)]

    assert sorted(hits) == hits
    assert hits[0] < hits[-1]


def test_a_prompt_hits_nothing_behind_a_block_that_is_gone() -> None:
    """An L2 of three blocks has blocks 3 and 4 of the first prompt, but its head has been evicted."""
    tier = _tier(_requests((1,), (1, 2, 3), (9,), (1, 2, 3)), 3, _THROUGH)

    assert not tier.hits(0)[-3:].any()
    assert tier.hits(9)[-3:].all()


def test_write_through_writes_what_is_computed_and_counts_what_is_not_read() -> None:
    tier = _tier(_requests((1,), (2,), (1,), (3,)), 1, _THROUGH)

    assert [True, True, False, True] == tier.writes(9).tolist()
    assert [False, True, False, True] == tier.unread(9).tolist()


def test_a_selective_policy_writes_at_the_first_hit_in_l2() -> None:
    tier = _tier(_requests((1,), (1,), (2,), (1,), (2,)), 1, WritePolicy.WRITE_THROUGH_SELECTIVE)

    assert [0] == tier.writes(9).nonzero()[0].tolist()
    assert 1 == tier.written_at[0]
    assert [3] == tier.reads(9).nonzero()[0].tolist()  # 2 had no second use in L2


def test_write_back_writes_at_the_eviction() -> None:
    tier = _tier(_requests((1,), (1,), (2,), (1,)), 1, WritePolicy.WRITE_BACK)

    assert 2 == tier.written_at[0]
    assert [3] == tier.reads(9).nonzero()[0].tolist()
    assert [True, False, True, False] == tier.writes(9).tolist()
