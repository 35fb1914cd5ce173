"""One rank of an engine in its own process, with a cache of its part of a model in a directory."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.file import FileStorage
from rank_workers import connect

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


class ReadFaultStorage(FileStorage):
    """A storage in a directory, whose reads fail or hang on demand."""

    read_fault: str = ""
    released: threading.Event

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if self.read_fault == "fails":
            raise StorageUnavailable("the disk is gone")
        if self.read_fault == "hangs":
            self.released.wait(60)
        return super().batch_get(space, hashes, pages)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The configuration of an engine, which is the same for all of its ranks."""

    rendezvous: str
    directory: str
    topology: Topology
    model: tuple[FleetPool, ...]
    timeout_s: float
    store_timeout_s: float


@dataclass(frozen=True)
class Served:
    """The result of a request on one rank."""

    pages: int
    right: bool
    explained: str


@dataclass
class _Engine:
    """The rank that this process is."""

    pools: list[tuple[FleetPool, CachePool]]
    controller: CacheController
    store: PageStore
    storage: ReadFaultStorage
    opened: ExitStack


_running: list[_Engine] = []


def start(spec: EngineSpec, rank: int) -> None:
    """Open this rank's cache, and connect to the other ranks."""
    stop()
    with ExitStack() as opened:
        ranks = connect(spec.rendezvous, rank, spec.topology.size, spec.timeout_s)
        opened.callback(ranks.close)
        storage = opened.enter_context(ReadFaultStorage.from_config({"path": spec.directory}))
        storage.released = threading.Event()
        settings = PageStoreSettings(timeout_s=spec.store_timeout_s, breaker_failures=1000)
        store = opened.enter_context(PageStore(storage, settings))
        pools = [
            (part, pool)
            for part in spec.model
            if (pool := part.cache_pool(spec.topology, rank)) is not None
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
    """Close this rank's cache."""
    while _running:
        _running.pop().opened.close()


def compute(hashes: list[str]) -> int:
    """Compute this rank's part of the pages. Return how many tiles were written to L3, in all pools."""
    engine = _running[0]
    fresh = engine.controller.reserve(hashes, timeout_s=20)
    for (part, pool), slots in zip(engine.pools, fresh.slots, strict=True):
        for page_hash, slot in zip(fresh.hashes, slots, strict=True):
            part.fill(pool, slot, page_hash)
    engine.controller.commit(fresh)
    assert engine.controller.drain(60)
    return engine.store.stats().get("save_ok", 0)


def serve(request_id: str, hashes: list[str]) -> Served:
    """Prefetch a prompt's prefix, and check every byte of it."""
    engine = _running[0]
    with engine.controller.prefetch(request_id, hashes).result() as lease:
        right = _is_right(engine, lease)
        return Served(lease.pages, right, str(engine.controller.explain(request_id)))


def serve_with_faults(seed: int, rank: int, turns: int, hashes: list[str]) -> list[int]:
    """Serve many requests while this rank's L2 is cleared and its reads fail.

    Return how many pages each request got; -1 stands for a cancelled one.
    """
    engine = _running[0]
    own = random.Random(f"{seed} {rank}")
    shared = random.Random(seed)  # the choices that an engine makes for all of its ranks
    found: list[int] = []
    for turn in range(turns):
        asked = hashes[: shared.randrange(1, len(hashes) + 1)]
        engine.storage.read_fault = own.choice(["", "", "fails"])
        if own.random() < 0.5:
            clear_l2()
        prefetch = engine.controller.prefetch(f"r-{turn}", asked)
        if shared.random() < 0.2:
            prefetch.cancel()
            found.append(-1)
            continue
        with prefetch.result() as lease:
            assert _is_right(engine, lease)
            found.append(lease.pages)
        compute(asked[found[-1] :])
    return found


def clear_l2() -> int:
    """Clear L2. Return how many pages are still pinned."""
    return _running[0].controller.cache.clear()


def set_read_fault(kind: str) -> None:
    """Make reads fail (`fails`), hang (`hangs`) or work ("") from now on."""
    engine = _running[0]
    engine.storage.read_fault = kind
    if kind != "hangs":
        engine.storage.released.set()


def counter(name: str) -> int:
    """Return one of the controller's counters."""
    return _running[0].controller.stats().get(name, 0)


def _is_right(engine: _Engine, lease: Lease) -> bool:
    return all(
        part.holds(pool, slot, lease.entries[page].page_hash)
        for (part, pool), pages, slots in zip(engine.pools, lease.indices, lease.slots, strict=True)
        for page, slot in zip(pages, slots, strict=True)
    )
