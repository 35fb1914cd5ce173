"""What a rank's process does in an engine of many: it caches its part of the model in a directory."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.file import FileStorage
from rank_workers import met

from hicache_storage.controller import CacheController, ControllerSettings, PrefetchPolicy
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page_store import PageStore, PageStoreSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleet import FleetPool

    from hicache_storage.controller import CachePool, Lease
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.topology import Topology


class TroubledStorage(FileStorage):
    """A directory whose reads can be made to fail, or to hang."""

    trouble: str = ""
    released: threading.Event

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if self.trouble == "fails":
            raise StorageUnavailable("the disk is gone")
        if self.trouble == "hangs":
            self.released.wait(60)
        return super().batch_get(space, hashes, pages)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all ranks of an engine are told."""

    meeting: str
    directory: str
    topology: Topology
    model: tuple[FleetPool, ...]
    timeout_s: float
    store_timeout_s: float


@dataclass(frozen=True)
class Served:
    """What a rank made of a request."""

    pages: int
    right: bool
    explained: str


@dataclass
class _Engine:
    """This process's rank."""

    pools: list[tuple[FleetPool, CachePool]]
    controller: CacheController
    store: PageStore
    storage: TroubledStorage
    opened: ExitStack


_running: list[_Engine] = []


def start(plan: Plan, rank: int) -> None:
    """Open this rank's cache, and meet the other ranks."""
    stop()
    with ExitStack() as opened:
        ranks = met(plan.meeting, rank, plan.topology.size, plan.timeout_s)
        opened.callback(ranks.close)
        storage = opened.enter_context(TroubledStorage.from_config({"path": plan.directory}))
        storage.released = threading.Event()
        settings = PageStoreSettings(timeout_s=plan.store_timeout_s, breaker_failures=1000)
        store = opened.enter_context(PageStore(storage, settings))
        pools = [
            (part, pool)
            for part in plan.model
            if (pool := part.cache_pool(plan.topology, rank)) is not None
        ]
        controller = opened.enter_context(
            CacheController(
                store,
                [pool for _, pool in pools],
                ControllerSettings(
                    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
                ),
                ranks=ranks,
            )
        )
        opened.callback(storage.released.set)
        _running[:] = [_Engine(pools, controller, store, storage, opened.pop_all())]


def stop() -> None:
    """Close what this rank has open."""
    while _running:
        _running.pop().opened.close()


def compute(hashes: list[str]) -> int:
    """Prefill this rank's part of the pages; how many pages, tiles of all pools, it wrote to L3."""
    engine = _running[0]
    fresh = engine.controller.reserve(hashes, timeout_s=20)
    for (part, pool), slots in zip(engine.pools, fresh.slots, strict=True):
        for page_hash, slot in zip(fresh.hashes, slots, strict=True):
            part.fill(pool, slot, page_hash)
    engine.controller.commit(fresh)
    assert engine.controller.drain(60)
    return engine.store.stats().get("save_ok", 0)


def serve(request_id: str, hashes: list[str]) -> Served:
    """Find a prompt's prefix, and look at every byte of it."""
    engine = _running[0]
    with engine.controller.prefetch(request_id, hashes).result() as lease:
        right = _is_right(engine, lease)
        return Served(lease.pages, right, str(engine.controller.explain(request_id)))


def serve_under_trouble(seed: int, rank: int, turns: int, hashes: list[str]) -> list[int]:
    """Pages found in each of many requests while this rank's L2 and store come and go; -1: cancelled."""
    engine = _running[0]
    own = random.Random(f"{seed} {rank}")
    together = random.Random(seed)  # what an engine decides for all of its ranks
    found: list[int] = []
    for turn in range(turns):
        asked = hashes[: together.randrange(1, len(hashes) + 1)]
        engine.storage.trouble = own.choice(["", "", "fails"])
        if own.random() < 0.5:
            forget()
        prefetch = engine.controller.prefetch(f"r-{turn}", asked)
        if together.random() < 0.2:
            prefetch.cancel()
            found.append(-1)
            continue
        with prefetch.result() as lease:
            assert _is_right(engine, lease)
            found.append(lease.pages)
        compute(asked[found[-1] :])
    return found


def forget() -> int:
    """Empty L2; how many pages are still pinned."""
    return _running[0].controller.cache.clear()


def trouble(kind: str) -> None:
    """What reads do from now on: `fails`, `hangs`, or nothing unusual."""
    engine = _running[0]
    engine.storage.trouble = kind
    if kind != "hangs":
        engine.storage.released.set()


def counter(name: str) -> int:
    """One of the controller's counters."""
    return _running[0].controller.stats().get(name, 0)


def _is_right(engine: _Engine, lease: Lease) -> bool:
    return all(
        part.holds(pool, slot, lease.entries[page].page_hash)
        for (part, pool), pages, slots in zip(engine.pools, lease.indices, lease.slots, strict=True)
        for page, slot in zip(pages, slots, strict=True)
    )
