"""Both sides of a hand-off for tests: ranks of engines, and a prefill rank in its own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import content_in
from pages import hash_of, space
from rank_workers import connect

from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    Lease,
    PrefetchPolicy,
    Ranks,
    Reservation,
)
from hicache_storage.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.lookup import HitPolicy
from hicache_storage.registry import open_storage
from hicache_storage.storage import HiCacheStorage
from hicache_storage.topology import Extent, Grid, Part, Topology

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
"""Settings with a short wait for completions, but enough time for a busy machine to load the pages."""
KINDS = ("mla-mha", "mha-mla", "mha-mha", "mla-mla")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of an engine of `size` tensor-parallel ranks in each of `stages` pipeline stages."""

    kind: str = "mla-mha"
    """The attention of target and draft. All ranks hold equal `mla` pages. `mha` and `swa` divide
    the heads among the ranks; a prefix of `swa` needs only the last pages.
    """
    rank: int = 0
    size: int = 1
    stages: int = 1
    """How many pipeline stages there are. The draft has one layer, on the last stage."""
    other_size: int = 0
    """The tensor-parallel size of engines on the other side, which share pages by heads. 0: `size`."""
    by_layers: bool = False
    """True if pages are cut between layers, so that engines with other stages share them."""

    def pools(self) -> list[CachePool]:
        """Return the pools of target and draft that this rank holds."""
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
                        host=HostPool(shape, slots=64, tiles=tiles),
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
    """Yield the controller and the page store of one `Rank` over `storage`."""
    with ExitStack() as stack:
        store = stack.enter_context(PageStore(storage, PageStoreSettings(timeout_s=5)))
        pools = Rank(**which).pools()
        controller = CacheController(store, pools, settings, ranks=ranks)
        yield stack.enter_context(controller), store


@contextmanager
def sending(
    storage: HiCacheStorage, *, handoff: HandoffSettings = PATIENT, **rank: Any
) -> Generator[HandoffSender, None, None]:
    """Yield the sender of a prefill rank."""
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
    """Yield the receiver of a decode rank."""
    with (
        engine_rank(storage, **rank) as (controller, store),
        HandoffReceiver(controller, store, handoff) as receiver,
    ):
        yield receiver


def compute(
    controller: CacheController, hashes: Sequence[str], *, without: Sequence[str] = ()
) -> None:
    """Fill new pages in every pool except those in `without`, and commit them."""
    fresh = controller.reserve(hashes, timeout_s=20)
    assert fresh.pages == len(hashes)
    for page_hash, key_space, page in _parts(controller.cache.pools, hashes, fresh):
        if key_space.pool not in without:
            page.copy_from(content_in(key_space, page_hash))
    controller.commit(fresh, without=without)


def is_right(lease: Lease, hashes: Sequence[str] = PROMPT) -> bool:
    """Return True if every page of every pool has the content of its key."""
    return all(
        page.tobytes() == content_in(key_space, page_hash)
        for page_hash, key_space, page in _parts(lease.cache.pools, hashes, lease)
    )


def _parts(
    pools: Sequence[CachePool], hashes: Sequence[str], pages: Lease | Reservation
) -> Iterator[tuple[str, KeySpace, Page]]:
    """Yield each page as it is stored: its hash, the key space of its rectangle, and its memory."""
    for pool, indices, slots in zip(pools, pages.indices, pages.slots, strict=True):
        for transfer in pool.transfers([hashes[index] for index in indices], slots):
            for page_hash, page in zip(transfer.hashes, transfer.pages, strict=True):
                yield page_hash, transfer.space, page.payload


def stored_pages(storage: HiCacheStorage) -> dict[str, int]:
    """Return how many pages a storage holds for each pool, completions included."""
    stored: dict[str, int] = {}
    for key_space in storage.spaces():
        pages = sum(1 for _ in storage.scan(key_space))
        if pages:
            stored[key_space.pool] = stored.get(key_space.pool, 0) + pages
    return stored


def start_prefill(
    backend: str, config: dict[str, Any], *, dies: str = "never", **rank: Any
) -> subprocess.Popen[str]:
    """Start a process that computes PROMPT and publishes it as `request-1`, or kills itself first."""
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


def decode(
    backend: str, config: dict[str, Any], place: str, handoff: HandoffSettings, rank: dict[str, Any]
) -> tuple[int, int, bool]:
    """Decode `request-1`. Return its pages, its missing completions, and if the content is right."""
    ranks = connect(place, rank["rank"], rank["size"], timeout_s=60)
    with (
        closing(ranks),
        open_storage(backend, config) as storage,
        receiving(storage, ranks=ranks, handoff=handoff, **rank) as receiver,
    ):
        request = receiver.expect("request-1", PROMPT)
        with request.result() as lease:
            return lease.pages, len(request.missing), is_right(lease)


if __name__ == "__main__":
    _prefill(json.loads(sys.argv[1]))
