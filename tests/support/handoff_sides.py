"""Both sides of a hand-off for tests: ranks of engines, and a prefill rank as a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import hash_of, space
from rank_workers import met

from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
)
from hicache_storage.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import HitPolicy
from hicache_storage.registry import open_storage
from hicache_storage.topology import Extent, Grid, Part, Topology

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from hicache_storage.controller import Lease, Ranks, Reservation
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage

HEADS = 4
PAGE_TOKENS = 16
WINDOW_PAGES = 3
HIT_POLICIES = {"swa": HitPolicy.TRAILING_PAGES}
PROMPT = [hash_of(number) for number in range(24)]
HALF = len(PROMPT) // 2
CONTROLLER = ControllerSettings(
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
)
PATIENT = HandoffSettings(timeout_s=60)
HASTY = HandoffSettings(timeout_s=0.3, grace_s=30, poll_max_s=0.02, load_every_s=0.1)
"""Gives up soon, but then lets a busy machine load what is there."""
KINDS = ("mla-mha", "mha-mla", "mha-mha", "mla-mla")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of an engine of `size` tensor-parallel ranks in each of `stages` pipeline stages."""

    kind: str = "mla-mha"
    """Of target and draft: latent pages are every rank's; `mha` shares out heads; so does `swa`, of
    which a prefix needs only the last pages."""
    rank: int = 0
    size: int = 1
    stages: int = 1
    """The draft, of one layer, is on the last of them."""
    other_size: int = 0
    """Of engines on the other side, with which pages are shared by heads; 0: as this one."""
    by_layers: bool = False
    """Pages are cut between layers, so that engines of other stages share them."""

    def pools(self, frame_nbytes: int) -> list[CachePool]:
        """Target and draft, as far as this rank holds them."""
        last = (0,) * (self.stages - 1) + (1,)
        attentions = self.kind.split("-")
        extents = [_extent(attentions[0], 3, None), _extent(attentions[1], 1, last)]
        topology = Topology(tp_size=self.size, pp_size=self.stages)
        pools: list[CachePool] = []
        for name, attention, extent in zip(("kv", "draft"), attentions, extents, strict=True):
            if part := topology.part(extent, self.rank):
                tiles = topology.tiles(extent, self.rank, self._grid(extent))
                shape = _shape(part)
                pools.append(
                    CachePool(
                        space=space(
                            pool=name,
                            page_tokens=PAGE_TOKENS,
                            page_nbytes=shape.nbytes,
                            shard=part.shard,
                        ),
                        host=HostPool(shape, slots=64, frame_nbytes=frame_nbytes, tiles=tiles),
                        required=name == "kv",
                        writes=part.writes,
                        hit_policy=HIT_POLICIES.get(attention, HitPolicy.ALL_PAGES),
                        window_pages=WINDOW_PAGES,
                    )
                )
        return pools

    def _grid(self, extent: Extent) -> Grid:
        ranks = max(self.size, self.other_size)
        return Grid(
            head_group=extent.heads and extent.heads // ranks,
            layer_group=1 if self.by_layers else None,
        )


def _extent(attention: str, layers: int, stage_layers: tuple[int, ...] | None) -> Extent:
    heads = None if attention == "mla" else HEADS
    return Extent(layers=layers, heads=heads, stage_layers=stage_layers)


def _shape(part: Part) -> PageShape:
    page: dict[str, Any] = {
        "page_tokens": PAGE_TOKENS,
        "layers": part.layers,
        "dtype": "bfloat16",
    }
    if part.heads is None:
        return PageShape.mla(kv_dim=8, **page)
    return PageShape.mha(heads=part.heads, head_dim=4, **page)


@contextmanager
def engine_rank(
    storage: HiCacheStorage,
    *,
    settings: ControllerSettings = CONTROLLER,
    ranks: Ranks | None = None,
    **which: Any,
) -> Generator[tuple[CacheController, PageStore], None, None]:
    """The cache of one `Rank` over `storage`."""
    with ExitStack() as stack:
        store = stack.enter_context(PageStore(storage, PageStoreSettings(timeout_s=5)))
        pools = Rank(**which).pools(store.frame_nbytes)
        controller = CacheController(store, pools, settings, ranks=ranks)
        yield stack.enter_context(controller), store


@contextmanager
def sending(
    storage: HiCacheStorage, *, handoff: HandoffSettings = PATIENT, **rank: Any
) -> Generator[HandoffSender, None, None]:
    """A prefill rank."""
    with (
        engine_rank(storage, **rank) as (controller, store),
        HandoffSender(controller, store, handoff) as sender,
    ):
        yield sender


@contextmanager
def receiving(
    storage: HiCacheStorage,
    *,
    handoff: HandoffSettings = PATIENT,
    **rank: Any,
) -> Generator[HandoffReceiver, None, None]:
    """A decode rank."""
    with (
        engine_rank(storage, **rank) as (controller, store),
        HandoffReceiver(controller, store, handoff) as receiver,
    ):
        yield receiver


def content(key_space: KeySpace, page_hash: str) -> bytes:
    """The bytes of a stored page: a function of its key space and hash, and of nothing else."""
    seed = hashlib.sha256(f"{key_space.id}{page_hash}".encode()).digest()
    return (seed * (key_space.page_nbytes // len(seed) + 1))[: key_space.page_nbytes]


def compute(
    controller: CacheController, hashes: Sequence[str], *, without: Sequence[str] = ()
) -> None:
    """Prefill: fill new pages in every pool but those `without`, and commit them."""
    fresh = controller.reserve(hashes, timeout_s=20)
    assert fresh.pages == len(hashes)
    for page_hash, key_space, page in _parts(controller.cache.pools, hashes, fresh):
        if key_space.pool not in without:
            page.copy_from(content(key_space, page_hash))
    controller.commit(fresh, without=without)


def is_right(lease: Lease, hashes: Sequence[str] = PROMPT) -> bool:
    """Whether every page of every pool holds what was written under its key."""
    return all(
        page.tobytes() == content(key_space, page_hash)
        for page_hash, key_space, page in _parts(lease.cache.pools, hashes, lease)
    )


def _parts(
    pools: Sequence[CachePool], hashes: Sequence[str], held: Lease | Reservation
) -> Iterator[tuple[str, KeySpace, Page]]:
    """Each page as storage has it: its hash, the key space of a rectangle, and the memory."""
    for pool, indices, slots in zip(pools, held.indices, held.slots, strict=True):
        for transfer in pool.transfers([hashes[index] for index in indices], slots):
            for page_hash, page in zip(transfer.hashes, transfer.pages, strict=True):
                yield page_hash, transfer.space, page.payload


def left_behind(storage: HiCacheStorage) -> dict[str, int]:
    """How many pages there are in each pool, completions included."""
    left: dict[str, int] = {}
    for key_space in storage.spaces():
        pages = sum(1 for _ in storage.scan(key_space))
        if pages:
            left[key_space.pool] = left.get(key_space.pool, 0) + pages
    return left


def start_prefill(
    backend: str, config: dict[str, Any], *, dies: str = "never", **rank: Any
) -> subprocess.Popen[str]:
    """A process that computes and publishes PROMPT as `request-1`, or is killed on the way."""
    order = {"backend": backend, "config": config, "dies": dies, "rank": rank}
    return subprocess.Popen(
        [sys.executable, "-W", "error", __file__, json.dumps(order)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        text=True,
    )


def _prefill(order: dict[str, Any]) -> None:
    dies = order["dies"]
    with (
        open_storage(order["backend"], order["config"]) as storage,
        engine_rank(storage, **order["rank"]) as (controller, store),
        HandoffSender(controller, store, PATIENT) as sender,
    ):
        if dies == "before its writes":
            os.kill(os.getpid(), signal.SIGKILL)
        compute(controller, PROMPT[:HALF])
        assert controller.drain(20)
        if dies == "within its writes":
            os.kill(os.getpid(), signal.SIGKILL)
        compute(controller, PROMPT[HALF:])
        if dies == "after its writes":
            assert controller.drain(20)
            os.kill(os.getpid(), signal.SIGKILL)
        assert sender.publish("request-1", PROMPT).result(60) == len(PROMPT)
        if dies == "after its completion":
            os.kill(os.getpid(), signal.SIGKILL)


def decoded(
    backend: str, config: dict[str, Any], place: str, handoff: HandoffSettings, rank: dict[str, Any]
) -> tuple[int, int, bool]:
    """What a process of a decode engine gets: pages, completions it missed, and whether all is right."""
    ranks = met(place, rank["rank"], rank["size"], timeout_s=60)
    with (
        closing(ranks),
        open_storage(backend, config) as storage,
        receiving(storage, ranks=ranks, handoff=handoff, **rank) as receiver,
    ):
        incoming = receiver.expect("request-1", PROMPT)
        with incoming.result() as lease:
            return lease.pages, len(incoming.missing), is_right(lease)


if __name__ == "__main__":
    _prefill(json.loads(sys.argv[1]))
