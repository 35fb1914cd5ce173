"""Replay a trace: prefetch each prefix, verify its bytes, then compute and commit the rest."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from hicache_storage.controller import CacheController, CachePool, Channel, ControllerSettings
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.errors import ConfigError
from hicache_storage.host_pool import HostPool
from hicache_storage.keys import KeySpace, page_hashes
from hicache_storage.observers import EventSource, open_observers
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.page_store.admission import Admission, AdmissionSettings
from hicache_storage.replay.content import PageContent
from hicache_storage.replay.report import RequestCounts, Throughput, figures
from hicache_storage.replay.swap import Swap
from hicache_storage.replay.timed_store import TimedPageStore
from hicache_storage.replay.trace import (
    BLOCK_TOKENS,
    InfiniteCache,
    block_tokens,
    check_page_tokens,
)
from hicache_storage.request_log import ExplainLogSettings, open_explain_log
from hicache_storage.scalars import format_nbytes
from hicache_storage.topology import Extent, Grid, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller import Lease, Ranks, Reservation
    from hicache_storage.events.settings import EventSettings
    from hicache_storage.page import Page
    from hicache_storage.replay.models import KVShape, PoolShape
    from hicache_storage.replay.trace import Request
    from hicache_storage.storage import HiCacheStorage

# Longer than any storage call takes, so a longer wait would not find a free slot either.
_RESERVE_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 60.0
_STOPPED_DRAIN_TIMEOUT_S = 5.0


class StopSignal(Protocol):
    """A signal that ends a replay early, for example a `threading.Event`."""

    def is_set(self) -> bool:
        """Return whether to stop. Called before each request, and once at the end."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Block until the signal is set, at most for `timeout_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The settings of a replay.

    Raises:
        ConfigError: The page size does not divide a block, or the host size does not hold a page.
    """

    model: str
    """Model name for the key spaces."""
    pools: tuple[PoolShape, ...]
    """All pools, the target first."""
    page_tokens: int = 64
    layout: str = "page_first"
    host_nbytes: int = 1 << 30
    """Bytes of a rank's L2. The pools share them, and all have the same number of slots."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    speed: float | None = None
    """Speed relative to the trace's own time. None: as fast as possible."""
    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    """Number of this process among the ranks of `topology`."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    """Which pages are written to L3. Rates refer to the trace's own time."""
    grid: Grid = field(default_factory=Grid)
    """The grid that cuts pages into tiles for the storage."""
    request_log: ExplainLogSettings = field(default_factory=ExplainLogSettings)
    """The log that records why each request's pages are missing."""
    events: EventSettings | None = None
    """The publisher of KV events, on rank 0. None: no events."""
    tracing: bool = False
    """Whether the page stores make OpenTelemetry spans."""

    def __post_init__(self) -> None:
        check_page_tokens(self.page_tokens)
        if not self.slots:
            raise ConfigError(
                f"--host-size of {format_nbytes(self.host_nbytes)} holds no page of"
                f" {format_nbytes(self.page_nbytes)}:"
                " give more, or make pages smaller with --scale-bytes or --page-size"
            )

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page, summed over all pools of a rank."""
        shapes = [rank_shape(pool.shape, self.topology, self.rank) for pool in self.pools]
        return sum(shape.page(self.page_tokens).nbytes for shape in shapes)

    @property
    def slots(self) -> int:
        """Number of pages that L2 holds."""
        return self.host_nbytes // self.page_nbytes


class Replay:
    """One run over one storage, which the caller closes. A context manager, for one thread.

    Requests run one after another. Without a `speed`, the replay drains the write queue whenever
    queued writes could take slots from the next prefetch. If the storage has no capacity limit, the
    sum of the hits then depends only on the trace and the size of L2. The split between L2 and L3
    depends on which pages writes have pinned at the time of an eviction, and so does the sum if the
    storage evicts.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        settings: ReplaySettings,
        *,
        next_storage: HiCacheStorage | None = None,
        ranks: Ranks | None = None,
        undoes: bool = False,
    ) -> None:
        """Allocate L2, open the key spaces and start the controller.

        Args:
            storage: The storage for the first requests.
            settings: The settings of the replay.
            next_storage: The storage that replaces `storage` during `run`, at `swap_after`.
            ranks: The consensus with the other ranks of the topology, which replay the same requests.
            undoes: True for a run that ends with `remove_pages`. The storages are then asked about each
                page before it is written.

        Raises:
            ConfigError: Shapes and layout do not match, the machine has too little memory for L2, or
                the log cannot be written.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: A key space could not be opened.
        """
        self.settings = settings
        self.counts: RequestCounts = RequestCounts()
        self._storage = storage
        self._ideal = InfiniteCache()
        self._undrained_pages = 0
        self._stopped = False
        self._drained = True
        self._ranks = ranks
        with ExitStack() as opened:
            self.stores: list[TimedPageStore] = _page_stores(
                storage, next_storage, settings, opened, undoes=undoes
            )
            self._store = self.stores[0]
            self.pools: list[CachePool] = cache_pools(settings, opened)
            self._contents = [
                [PageContent(part.space) for part in pool.stored] for pool in self.pools
            ]
            self._arrival_s = 0.0
            admission = Admission(settings.admission, clock=lambda: self._arrival_s)
            explain_log = open_explain_log(
                settings.request_log, engine="replay", rank=settings.rank
            )
            if explain_log is not None:
                opened.callback(explain_log.close)
            self.controller: CacheController = CacheController(
                self._store,
                self.pools,
                settings.controller,
                ranks=ranks,
                admission=admission if settings.admission.is_enabled else None,
                explain_log=explain_log,
            )
            opened.callback(self.finish)
            self.controller.start()
            self.swap: Swap | None = None
            if next_storage is not None:
                self.swap = Swap(controller=self.controller, store=self.stores[1])
            self._opened = opened.pop_all()

    def run(
        self,
        requests: Iterable[Request],
        *,
        stop: StopSignal | None = None,
        progress: Callable[[RequestCounts], None] | None = None,
        swap_after: int | None = None,
    ) -> bool:
        """Replay `requests` until `stop`, and drain the writes. Return whether all were replayed.

        The second storage replaces the first after `swap_after` requests.
        """
        stop = stop or threading.Event()
        speed = self.settings.speed
        began_s = time.monotonic()
        first_s: float | None = None
        for number, request in enumerate(requests):
            first_s = request.arrival_s if first_s is None else first_s
            if speed:
                due_s = began_s + (request.arrival_s - first_s) / speed
                stop.wait(min(max(0.0, due_s - time.monotonic()), MAX_DURATION_S))
            if stop.is_set():
                break
            if self.swap is not None and number == swap_after:
                self.swap.start()
            self._arrival_s = request.arrival_s
            self._serve(f"request-{number}", request)
            if progress:
                progress(self.counts)
        self._stopped = stop.is_set()
        if self.swap is not None:
            self.swap.wait()
        self._drained = self.controller.drain(self._drain_timeout_s)
        return not self._stopped

    def finish(self) -> None:
        """Write the pages that the write policy has deferred, and stop. This makes the figures final."""
        drain = not self._stopped
        ended = self.controller.close(drain=drain, timeout_s=self._drain_timeout_s)
        self._drained = self._drained and ended

    @property
    def _drain_timeout_s(self) -> float:
        return _STOPPED_DRAIN_TIMEOUT_S if self._stopped else _DRAIN_TIMEOUT_S

    def remove_pages(self) -> int:
        """After `finish`, delete the pages that this run was the first to make.

        Return how many pages of all pools may be left.
        """
        return sum(store.remove_own_pages() for store in self.stores)

    def figures(self) -> dict[str, Any]:
        """Return everything that was counted so far, ready for JSON."""
        return figures(
            self.counts,
            page_tokens=self.settings.page_tokens,
            read=_throughput("load", self.stores),
            write=_throughput("save", self.stores),
            controller=self.controller.stats(),
            store=self._store.stats(),
            storage=self._storage.stats().counters,
            unsaved=[store.unsaved for store in self.stores],
            drained=self._drained,
        )

    @property
    def stored_spaces(self) -> list[list[str]]:
        """Ids of the key spaces in the storage, for each pool."""
        frame_nbytes = self._store.frame_nbytes
        return [
            [replace(part.space, frame_nbytes=frame_nbytes).id for part in pool.stored]
            for pool in self.pools
        ]

    def close(self) -> None:
        """Stop the controller and release L2. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request_id: str, request: Request) -> None:
        hashes = self._hashes(request)
        if self.settings.speed is None:
            self._drain_before(len(hashes))
        began_s = time.perf_counter()
        with self.controller.prefetch(request_id, hashes).result() as lease:
            self.counts.prefetch_s.append(time.perf_counter() - began_s)
            self._verify(hashes, lease)
            found, loaded = lease.pages, lease.loaded
        # By now an engine has the prefix in device memory, so its slots in L2 may be evicted.
        self._compute(hashes[found:])
        self.counts.ideal_block_hits += self._ideal.hits(request)
        self.counts.add_prompt(
            len(hashes), found, loaded, BLOCK_TOKENS // self.settings.page_tokens
        )

    def _hashes(self, request: Request) -> list[str]:
        return page_hashes(block_tokens(request.blocks), self.settings.page_tokens)

    def _drain_before(self, pages: int) -> None:
        """Drain the writes if they could take slots from the next `pages`."""
        self._undrained_pages += pages
        if self._undrained_pages > self.settings.slots:
            self.controller.drain(_DRAIN_TIMEOUT_S)
            if self._ranks is not None:  # another rank may still write pages that this one reads
                self._ranks.all_reduce_min(Channel.RESULT, [0])
            self._undrained_pages = pages

    def _verify(self, hashes: Sequence[str], lease: Lease) -> None:
        """Compare every byte of the usable prefix, in every pool, with the content that was written."""
        intact = [True] * lease.pages
        for pool, contents, slots in zip(self.pools, self._contents, lease.slots, strict=True):
            for number, slot in enumerate(slots):
                if not all(
                    content.matches(hashes[number], page)
                    for content, page in zip(contents, _tiles(pool, slot), strict=True)
                ):
                    self.counts.corrupt_pages += 1
                    intact[number] = False
            self.counts.verified_nbytes += len(slots) * pool.space.page_nbytes
        self.counts.paired_pages += sum(intact)

    def _compute(self, hashes: Sequence[str]) -> None:
        """Fill and commit the missing pages, in each round as many as L2 has slots for."""
        while hashes:
            if self.settings.admission.is_enabled and self.settings.speed is None:
                # Some pages are only in L2. Without this call, hits would depend on which pages are
                # pinned by writes.
                self.controller.drain(_DRAIN_TIMEOUT_S)
            reservation = self.controller.reserve(hashes, timeout_s=_RESERVE_TIMEOUT_S)
            if not reservation.pages:
                self.counts.unreserved_pages += len(hashes)
                return
            self._fill(reservation)
            self.controller.commit(reservation)
            hashes = hashes[reservation.pages :]

    def _fill(self, reservation: Reservation) -> None:
        for pool, contents, slots in zip(
            self.pools, self._contents, reservation.slots, strict=True
        ):
            for page_hash, slot in zip(reservation.hashes, slots, strict=True):
                for content, page in zip(contents, _tiles(pool, slot), strict=True):
                    content.write(page_hash, page)


def _page_stores(
    storage: HiCacheStorage,
    next_storage: HiCacheStorage | None,
    settings: ReplaySettings,
    opened: ExitStack,
    *,
    undoes: bool,
) -> list[TimedPageStore]:
    """Return a page store for each storage. Every storage must have the frame size of L2."""
    pools = {pool.name for pool in settings.pools}
    events = (
        EventSource(
            settings=settings.events,
            announces=lambda space: space.pool in pools,
            hash_format="int64",
        )
        if settings.events is not None and settings.rank == 0
        else None
    )
    observers = open_observers(
        tracing=settings.tracing,
        attributes={"engine": "replay", "rank": settings.rank},
        events=events,
    )
    for observer in observers:
        opened.callback(observer.close)
    stores = [
        TimedPageStore(
            each,
            PageStoreSettings(checksum=settings.checksum),
            observers=observers,
            undoes=undoes,
        )
        for each in (storage, next_storage)
        if each is not None
    ]
    for store in stores:
        opened.callback(store.close)
    return stores


def _tiles(pool: CachePool, slot: int) -> list[Page]:
    """Return the pages that the storage holds for a slot: its tiles, or the slot itself."""
    return [pool.host.tile_page(slot, tile) for tile in range(len(pool.stored))]


def _throughput(direction: str, stores: Sequence[TimedPageStore]) -> Throughput:
    return Throughput(
        nbytes=sum(store.stats().get(f"{direction}_nbytes", 0) for store in stores),
        busy_s=sum(store.busy[direction].total_s for store in stores),
    )


# --- pools ------------------------------------------------------------------------------------------


def extent_of(shape: KVShape) -> Extent:
    """Return the layers and heads of the whole model in a pool."""
    return Extent(layers=shape.layers, heads=shape.heads if shape.kind == "mha" else None)


def rank_shape(shape: KVShape, topology: Topology, rank: int) -> KVShape:
    """Return the part of a pool that one rank holds.

    Raises:
        ConfigError: The ranks do not split the heads evenly.
    """
    part = topology.part(extent_of(shape), rank)
    return shape if part is None else replace(shape, layers=part.layers, heads=part.heads or 1)


def cache_pools(settings: ReplaySettings, opened: ExitStack) -> list[CachePool]:
    """Allocate the pools of this rank's L2. `opened` releases them.

    Raises:
        ConfigError: Shapes, layout, ranks or grid do not match, or the machine has too little memory.
    """
    memory_nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if settings.host_nbytes * settings.topology.size > memory_nbytes:
        ranks = f" on each of {settings.topology.size} ranks" if settings.topology.size > 1 else ""
        raise ConfigError(
            f"--host-size of {format_nbytes(settings.host_nbytes)}{ranks}: this machine has"
            f" only {format_nbytes(memory_nbytes)}"
        )
    pools: list[CachePool] = []
    for pool in settings.pools:
        try:
            pools.append(_cache_pool(pool, settings, opened))
        except MemoryError as error:
            reason = str(error).partition(";")[0]
            raise ConfigError(
                f"--host-size of {format_nbytes(settings.host_nbytes)}: {reason}; give less"
            ) from error
        except ValueError as error:
            raise ConfigError(f"pool {pool.name!r} ({pool.shape}): {error}") from error
    return pools


def _cache_pool(pool: PoolShape, settings: ReplaySettings, opened: ExitStack) -> CachePool:
    extent, topology, rank = extent_of(pool.shape), settings.topology, settings.rank
    part = topology.part(extent, rank)
    if part is None:
        raise ValueError(f"rank {rank} holds none of the pool's layers")
    shape = rank_shape(pool.shape, topology, rank).page(settings.page_tokens)
    grid = settings.grid if extent.heads is not None else Grid()
    host = HostPool(
        shape,
        slots=settings.slots,
        layout=settings.layout,
        tiles=topology.tiles(extent, rank, grid),
    )
    space = KeySpace(
        model=settings.model,
        dtype=shape.dtype,
        layout=settings.layout,
        page_tokens=settings.page_tokens,
        page_nbytes=shape.nbytes,
        shard=part.shard,
        pool=pool.name,
    )
    return CachePool(
        space=space,
        host=opened.enter_context(host),
        writes=part.writes,
    )
