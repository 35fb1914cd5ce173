"""Plays the engine: asks for prefixes, proves what comes, computes and commits what does not."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from hicache_storage.controller import CacheController, Channel, ControllerSettings
from hicache_storage.durations import MAX_DURATION_S
from hicache_storage.errors import ConfigError
from hicache_storage.keys import page_hashes
from hicache_storage.page_store import PageStoreSettings
from hicache_storage.replay.content import PageContent
from hicache_storage.replay.pools import cache_pools, rank_shape
from hicache_storage.replay.report import Flow, Tally, figures
from hicache_storage.replay.swap import Swap
from hicache_storage.replay.timed_store import TimedPageStore
from hicache_storage.replay.trace import BLOCK_TOKENS, InfiniteCache, block_tokens
from hicache_storage.topology import Grid, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.controller import CachePool, Lease, Ranks, Reservation
    from hicache_storage.page import Page
    from hicache_storage.replay.models import PoolShape
    from hicache_storage.replay.trace import Request
    from hicache_storage.storage import HiCacheStorage

# Longer than any storage call may take: when it is over, waiting longer helps nobody.
_ROOM_TIMEOUT_S = 30.0
_DRAIN_TIMEOUT_S = 60.0
_STOPPED_DRAIN_TIMEOUT_S = 5.0


class Stop(Protocol):
    """What ends a replay early, as `threading.Event` does."""

    def is_set(self) -> bool:
        """Whether no further request is to be played. Asked once for each, and once at the end."""
        ...

    def wait(self, timeout_s: float, /) -> bool:
        """Wait for it, no longer than that."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """What a replay runs with.

    Raises:
        ConfigError: Pages that do not fill a block, or a host size that holds no page.
    """

    model: str
    """As in keys."""
    pools: tuple[PoolShape, ...]
    """The target first."""
    page_tokens: int = 64
    layout: str = "page_first"
    host_nbytes: int = 1 << 30
    """L2 of a rank: shared by the pools so that each has the same number of slots."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    speed: float | None = None
    """Times real time; None: each request as soon as the one before is done."""
    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    """This process, of those of `topology`."""
    grid: Grid = field(default_factory=Grid)
    """How pages of heads are cut for the storage."""

    def __post_init__(self) -> None:
        if BLOCK_TOKENS % self.page_tokens:
            raise ConfigError(
                f"--page-size must divide the trace's blocks of {BLOCK_TOKENS} tokens,"
                f" and {self.page_tokens} does not"
            )
        if not self.slots:
            raise ConfigError(
                f"--host-size of {self.host_nbytes} bytes holds no page of {self.page_nbytes} bytes:"
                " give more, or make pages smaller with --scale-bytes or --page-size"
            )

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page in all pools of a rank."""
        shapes = [rank_shape(pool.shape, self.topology, self.rank) for pool in self.pools]
        return sum(shape.page(self.page_tokens).nbytes for shape in shapes)

    @property
    def slots(self) -> int:
        """Pages that L2 holds."""
        return self.host_nbytes // self.page_nbytes


class Replay:
    """One run over one storage, which stays the caller's. A context manager; used from one thread.

    Requests run one after another. As fast as possible, the write queue is let run dry whenever it could
    keep the next prefetch from its slots: what is found depends on the trace and on the size of L2 then,
    not on how quick the storage is.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        settings: ReplaySettings,
        *,
        next_storage: HiCacheStorage | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Allocate L2, open the key spaces, start the controller.

        Args:
            storage: The first requests'.
            settings: What the replay runs with.
            next_storage: Takes the first one's place while requests run, where `run` is told when.
            ranks: The others of the settings' topology, all of which replay the same requests.

        Raises:
            ConfigError: Shapes and layout that do not go together, or more L2 than there is memory.
            StorageUnavailable, StorageTimeout, UnsupportedOperation: From opening the key spaces.
        """
        self.settings = settings
        self.tally: Tally = Tally()
        self._storage = storage
        self._ideal = InfiniteCache()
        self._unsettled_pages = 0
        self._stopped = False
        self._drained = True
        self._ranks = ranks
        with ExitStack() as opened:
            self._stores = _page_stores(storage, next_storage, settings, opened)
            self._store = self._stores[0]
            self.pools: list[CachePool] = cache_pools(settings, self._store.frame_nbytes, opened)
            self._contents = [
                [PageContent(part.space) for part in pool.stored] for pool in self.pools
            ]
            self._controller = CacheController(
                self._store, self.pools, settings.controller, ranks=ranks
            )
            opened.callback(self.finish)
            self._controller.start()
            self.swap: Swap | None = None
            if next_storage is not None:
                self.swap = Swap(controller=self._controller, store=self._stores[1])
            self._opened = opened.pop_all()

    def run(
        self,
        requests: Iterable[Request],
        *,
        stop: Stop | None = None,
        progress: Callable[[Tally], None] | None = None,
        swap_after: int | None = None,
    ) -> bool:
        """Replay `requests` until `stop`, and let writes finish; whether all of them were replayed.

        With `swap_after`, the next storage takes over from that many requests on.
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
                self.swap.begin()
            self._serve(f"request-{number}", request)
            if progress:
                progress(self.tally)
        self._stopped = stop.is_set()
        if self.swap is not None:
            self.swap.wait()
        self._drained = self._controller.drain(self._drain_timeout_s)
        return not self._stopped

    def finish(self) -> None:
        """Write what the write policy keeps for the end, and stop. Figures are whole from then on."""
        drain = not self._stopped
        ended = self._controller.close(drain=drain, timeout_s=self._drain_timeout_s)
        self._drained = self._drained and ended

    @property
    def _drain_timeout_s(self) -> float:
        return _STOPPED_DRAIN_TIMEOUT_S if self._stopped else _DRAIN_TIMEOUT_S

    def figures(self) -> dict[str, Any]:
        """Return everything counted so far, ready for JSON."""
        counters = self._store.stats()
        return figures(
            self.tally,
            page_tokens=self.settings.page_tokens,
            read=_flow("load", self._stores),
            write=_flow("save", self._stores),
            controller=self._controller.stats(),
            store=counters,
            storage=self._storage.stats().counters,
            unsaved=[store.unsaved for store in self._stores],
            drained=self._drained,
        )

    @property
    def stored_spaces(self) -> list[list[str]]:
        """For each pool, the ids of the key spaces that the storage has its pages in."""
        frame_nbytes = self._store.frame_nbytes
        return [
            [replace(part.space, frame_nbytes=frame_nbytes).id for part in pool.stored]
            for pool in self.pools
        ]

    def close(self) -> None:
        """Stop the controller and give L2 back. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one request ---------------------------------------------------------------------------------

    def _serve(self, request_id: str, request: Request) -> None:
        hashes = page_hashes(block_tokens(request.blocks), self.settings.page_tokens)
        if self.settings.speed is None:
            self._settle(len(hashes))
        began_s = time.perf_counter()
        with self._controller.prefetch(request_id, hashes).result() as lease:
            self.tally.prefetch_s.append(time.perf_counter() - began_s)
            self._verify(hashes, lease)
            found, loaded = lease.pages, lease.loaded
        # An engine has its prefix in device memory by now: host memory is free for what it computes.
        self._compute(hashes[found:])
        self.tally.ideal_block_hits += self._ideal.hits(request)
        self.tally.place(len(hashes), found, loaded, BLOCK_TOKENS // self.settings.page_tokens)

    def _settle(self, pages: int) -> None:
        """Wait for the writes that could keep the next `pages` from being loaded."""
        self._unsettled_pages += pages
        if self._unsettled_pages > self.settings.slots:
            self._controller.drain(_DRAIN_TIMEOUT_S)
            if self._ranks is not None:  # a rank may need what another is writing
                self._ranks.all_reduce_min(Channel.RESULT, [0])
            self._unsettled_pages = pages

    def _verify(self, hashes: Sequence[str], lease: Lease) -> None:
        """Compare every byte of the usable prefix, in every pool, with what was written."""
        whole = [True] * lease.pages
        for pool, contents, slots in zip(self.pools, self._contents, lease.slots, strict=True):
            for number, slot in enumerate(slots):
                if not all(
                    content.matches(hashes[number], page)
                    for content, page in zip(contents, _tiles(pool, slot), strict=True)
                ):
                    self.tally.corrupt_pages += 1
                    whole[number] = False
            self.tally.verified_nbytes += len(slots) * pool.space.page_nbytes
        self.tally.paired_pages += sum(whole)

    def _compute(self, hashes: Sequence[str]) -> None:
        """Make the pages that were not found, as many at a time as L2 has room for."""
        while hashes:
            fresh = self._controller.reserve(hashes, timeout_s=_ROOM_TIMEOUT_S)
            if not fresh.pages:
                self.tally.unreserved_pages += len(hashes)
                return
            self._fill(fresh)
            self._controller.commit(fresh)
            hashes = hashes[fresh.pages :]

    def _fill(self, fresh: Reservation) -> None:
        for pool, contents, slots in zip(self.pools, self._contents, fresh.slots, strict=True):
            for page_hash, slot in zip(fresh.hashes, slots, strict=True):
                for content, page in zip(contents, _tiles(pool, slot), strict=True):
                    content.write(page_hash, page)


def _page_stores(
    storage: HiCacheStorage,
    next_storage: HiCacheStorage | None,
    settings: ReplaySettings,
    opened: ExitStack,
) -> list[TimedPageStore]:
    """One for each storage, whose pages must have headers of one size: L2 has memory for that."""
    stores = [
        TimedPageStore(each, PageStoreSettings(checksum=settings.checksum))
        for each in (storage, next_storage)
        if each is not None
    ]
    for store in stores:
        opened.callback(store.close)
    sizes = [store.frame_nbytes for store in stores]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"--swap-backend: L2 has headers of {sizes[0]} bytes, and this storage needs {sizes[1]}:"
            " swap storages of one alignment"
        )
    return stores


def _tiles(pool: CachePool, slot: int) -> list[Page]:
    """What the storage calls pages: the parts of a slot, or the whole of it."""
    return [pool.host.framed_page(slot, tile).payload for tile in range(len(pool.stored))]


def _flow(direction: str, stores: Sequence[TimedPageStore]) -> Flow:
    return Flow(
        nbytes=sum(store.stats().get(f"{direction}_nbytes", 0) for store in stores),
        busy_s=sum(store.busy[direction].total_s for store in stores),
    )
