"""KV-106: ranks with different bytes share no page, and ranks with the same bytes share every page."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING

from hicache_conformance.case.case import Forgot
from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import Violation
from hicache_conformance.scenarios.setup import fitting, note, open_and_set
from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_conformance.tools.processes.child import Link

_SHARDS = (
    *(Shard(layers=(0, 32), heads=(first, first + 2)) for first in range(0, 8, 2)),
    *(Shard(layers=(first, first + 8), heads=(0, 8)) for first in range(0, 32, 8)),
    *(Shard(layers=(first, first + 16), heads=(0, 4)) for first in (0, 16)),
    *(Shard(layers=(first, first + 16), heads=(4, 8)) for first in (0, 16)),
    *(Shard(layers=(0, 8), heads=(0, 8), context=(rank, 4)) for rank in range(4)),
    *(Shard(layers=(0, 32), context=(rank, 2)) for rank in range(2)),
    Shard(layers=(0, 8), heads=(8, 16)),
)
"""The ranks of four ways to cut one model into quarters, and a rank with layers and heads swapped."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "TP_RANK", "PP_RANK", "CUDA_VISIBLE_DEVICES", "HOSTNAME")


@check("KV-106")
def ranks_of_a_sharded_pool_share_nothing(case: Case) -> None:
    """Ranks with different heads, layers or context each keep their own bytes under one hash."""
    store = case.open()
    ranks = [case.space(fitting(case, 512), shard=shard) for shard in _SHARDS]
    hashes = case.hashes(2)
    for rank in ranks:
        store.open_space(rank)
        case.must_miss(store, rank, hashes, f"was set by other ranks, not by {_rectangle(rank)}")
        open_and_set(case, store, rank, *hashes)
    for rank in ranks:
        with note(f"rank with {_rectangle(rank)}, after all ranks have set this hash"):
            case.must_hold(store, rank, case.contents(rank, hashes))


@check("KV-106", Need.SHARED)
def ranks_with_handles_of_their_own_share_nothing(case: Case) -> None:
    """Ranks that each have a handle on a shared store keep their own bytes under one hash."""
    hashes = case.hashes(2)
    ranks = [(case.open(), case.space(fitting(case, 512), shard=one)) for one in _SHARDS[:6]]
    for store, rank in ranks:
        store.open_space(rank)
    for store, rank in ranks:
        case.must_miss(store, rank, hashes, f"was set by other ranks, not by {_rectangle(rank)}")
        open_and_set(case, store, rank, *hashes)
    for store, rank in ranks:
        with note(f"rank with {_rectangle(rank)}, after all ranks have set this hash"):
            case.must_hold(store, rank, case.contents(rank, hashes))


@check("KV-106")
def ranks_of_a_sharded_draft_share_nothing(case: Case) -> None:
    """Ranks of a sharded draft pool each keep their own bytes, even if the target is replicated."""
    store = case.open()
    target = _replicated(case)
    hashes = case.hashes(2)
    open_and_set(case, store, target, *hashes)
    for pool in ("draft", "swa"):
        shards = [Shard(layers=(0, 16), heads=(first, first + 2)) for first in range(0, 8, 2)]
        ranks = [
            case.space(fitting(case, 256), model=target.model, pool=pool, shard=shard)
            for shard in shards
        ]
        for rank in ranks:
            store.open_space(rank)
            case.must_miss(
                store, rank, hashes, f"was set by other ranks, not by {_rectangle(rank)}"
            )
            open_and_set(case, store, rank, *hashes)
        for rank in ranks:
            with note(f"pool {pool!r} of the rank with {_rectangle(rank)}, with a replicated pool"):
                case.must_hold(store, rank, case.contents(rank, hashes))
    case.must_hold(store, target, case.contents(target, hashes))


@check("KV-106")
def a_replicated_pool_is_one_for_equal_key_spaces(case: Case) -> None:
    """Ranks that build equal key spaces of a replicated pool each find what the others set."""
    store = case.open()
    space = _replicated(case)
    held: dict[str, bytes] = {}
    for rank in range(3):
        own = _equal_space(space)
        store.open_space(own)
        held.update(case.stored(store, own, 2))
        with note(f"as rank {rank} sees it, of {rank + 1} that made equal key spaces"):
            case.must_hold(store, own, held)
    _must_be_listed_once(case, store, space, held)


@check("KV-106", Need.SHARED)
def a_replicated_pool_is_one_for_all_handles(case: Case) -> None:
    """Ranks that each have a handle on a shared store find what others set in a replicated pool."""
    space = _replicated(case)
    ranks = [(case.open(label=f"rank{rank}"), _equal_space(space)) for rank in range(4)]
    for store, own in ranks:
        store.open_space(own)
    held: dict[str, bytes] = {}
    for store, own in ranks:
        held.update(case.stored(store, own, 2))
    for number, (store, own) in enumerate(ranks):
        with note(f"as rank {number} of {len(ranks)} sees a pool that all of them hold alike"):
            case.must_set(store, own, dict(itertools.islice(held.items(), 3)))
            case.must_hold(store, own, held)
    _must_be_listed_once(case, ranks[0][0], space, held)


@check("KV-106", Need.SHARED)
def a_replicated_pool_is_one_for_all_processes(case: Case) -> None:
    """Ranks in processes with different environments find what others set in a replicated pool."""
    space = _replicated(case)
    store = case.open()
    store.open_space(space)
    held = case.stored(store, space, 3)
    for rank in (1,) if case.quick else (1, 2):
        own = case.contents(space, case.hashes(2))
        child = case.child(_rank_actor, rank, space.manifest(), list(held), own)
        found: dict[str, bytes | None] = child.receive()
        for page_hash, data in found.items():
            if data not in (held[page_hash], None):
                raise case.wrong_bytes(store, space, page_hash, data or b"", [held[page_hash]])
        missed = [page_hash for page_hash, data in found.items() if data is None]
        if missed and (case.keeps or len(missed) == len(found)):
            raise (Violation if case.keeps else Forgot)(
                "a rank in another process does not find a page of a replicated pool",
                "the pages that this process set: its key space has no heads, so all ranks hold"
                " the same bytes",
                f"process of rank {rank}: {len(missed)} of {len(found)} are misses",
                case.trace.sequence("open_space", "batch_set"),
            )
        held.update(own)
        with note(f"set by a process of rank {rank} in a replicated pool"):
            case.must_hold(store, space, own)
        child.send("close")


def _rank_actor(
    link: Link,
    rank: int,
    manifest: dict[str, object],
    hashes: Sequence[str],
    own: dict[str, bytes],
) -> None:
    """Actor: set `own`, then send which of `hashes`, set by other ranks, this rank finds.

    It closes only when the parent has looked, because pages in memory that it lends go with it.
    """
    os.environ.update(dict.fromkeys(_RANK_VARIABLES, str(rank)))
    store = link.open()
    space = KeySpace.from_manifest(manifest)
    store.open_space(space)
    found = dict(zip(hashes, store.get(space, hashes), strict=True))
    store.set(space, own)
    link.send(found)
    link.receive()
    store.close()


def _replicated(case: Case) -> KeySpace:
    return case.space(fitting(case, 576), shard=Shard(layers=(0, 32)), pool="kv")


def _equal_space(space: KeySpace) -> KeySpace:
    """Return a key space that equals `space` and shares no object with it."""
    return KeySpace.from_manifest(json.loads(json.dumps(space.manifest())))


def _must_be_listed_once(case: Case, store: Probe, space: KeySpace, held: dict[str, bytes]) -> None:
    if not case.claims.enumerable:
        return
    listed = [info.page_hash for info in store.scan(space)]
    if len(set(listed)) != len(listed) or not set(listed) <= set(held):
        raise store.violation(
            "a replicated pool holds more than one copy of a page",
            expected=f"scan lists at most the {len(held)} pages, once each",
            got=f"{len(listed)} entries, {len(set(listed))} different hashes",
        )


def _rectangle(space: KeySpace) -> str:
    shard = space.shard
    return f"layers {shard.layers}, heads {shard.heads}, context {shard.context}"
