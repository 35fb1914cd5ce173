"""The engine's part in tests of the controller: pools, and pages whose bytes follow from their key."""

from __future__ import annotations

import hashlib
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

from pages import hash_of, space

from hicache_storage.controller import (
    CacheController,
    CachePool,
    ControllerSettings,
    PrefetchPolicy,
    RanksLost,
)
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.page_store.frame import FRAME_NBYTES
from hicache_storage.page_store.lookup import HitPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from hicache_storage.controller import Channel, Lease
    from hicache_storage.storage import HiCacheStorage

PAGE_TOKENS = 16
TARGET_SHAPE = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=2, heads=2, head_dim=4, dtype="bfloat16"
)
DRAFT_SHAPE = PageShape.mha(
    page_tokens=PAGE_TOKENS, layers=1, heads=2, head_dim=4, dtype="bfloat16"
)
PROMPT = [hash_of(number) for number in range(16)]


def cache_pool(
    name: str, shape: PageShape = DRAFT_SHAPE, slots: int = 32, **more: Any
) -> CachePool:
    """A pool of small pages; `more` are its other fields."""
    return CachePool(
        space=space(pool=name, page_tokens=PAGE_TOKENS, page_nbytes=shape.nbytes),
        host=HostPool(shape, slots=slots, frame_nbytes=FRAME_NBYTES),
        **more,
    )


def cache_pools(slots: int = 32, *, draft_slots: int | None = None) -> list[CachePool]:
    """A target and a draft pool, both required."""
    return [
        cache_pool("kv", TARGET_SHAPE, slots),
        cache_pool("draft", DRAFT_SHAPE, draft_slots or slots),
    ]


def optional_draft(slots: int = 32) -> list[CachePool]:
    """A target, and a draft that it can do without."""
    return [
        cache_pool("kv", TARGET_SHAPE, slots),
        cache_pool("draft", DRAFT_SHAPE, slots, required=False),
    ]


def windowed(slots: int = 32, *, window_pages: int = 2, window_slots: int = 8) -> list[CachePool]:
    """A target with a sliding window beside it, and a draft that it can do without."""
    swa = cache_pool(
        "swa",
        DRAFT_SHAPE,
        window_slots,
        hit_policy=HitPolicy.TRAILING_PAGES,
        window_pages=window_pages,
    )
    return [*optional_draft(slots), swa]


@contextmanager
def engine_on(
    storage: HiCacheStorage | None,
    pools: Sequence[CachePool],
    *,
    timeout_s: float = 20,
    ranks: Any = None,
    **settings: Any,
) -> Generator[CacheController]:
    """An engine with an L2 of its own; it waits for all that there is unless told otherwise."""
    with ExitStack() as stack:
        store = None if storage is None else stack.enter_context(page_store(storage, timeout_s))
        chosen: dict[str, Any] = {
            "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
            "prefetch_threshold_tokens": 0,
            "batch_pages": 4,
            **settings,
        }
        controller = CacheController(store, pools, ControllerSettings(**chosen), ranks=ranks)
        yield stack.enter_context(controller)


def page_store(storage: HiCacheStorage, timeout_s: float = 20) -> PageStore:
    """One whose breaker stays out of the way."""
    return PageStore(storage, PageStoreSettings(timeout_s=timeout_s, breaker_failures=1000))


def content(pool: CachePool, page_hash: str) -> bytes:
    """The bytes of a page: a function of its key space and hash, and of nothing else."""
    seed = hashlib.sha256(f"{pool.space.id}{page_hash}".encode()).digest()
    return (seed * (pool.space.page_nbytes // len(seed) + 1))[: pool.space.page_nbytes]


def compute(
    controller: CacheController,
    hashes: Sequence[str],
    *,
    timeout_s: float = 20,
    ends: Collection[int] | None = None,
    without: Collection[str] = (),
) -> int:
    """Prefill: fill new pages in every pool and commit them; how many there was room for."""
    reservation = controller.reserve(hashes, ends=ends, timeout_s=timeout_s)
    for pool, pages, slots in zip(
        controller.cache.pools, reservation.indices, reservation.slots, strict=True
    ):
        for page, slot in zip(pages, slots, strict=True):
            if pool.space.pool not in without:
                pool.host.page(slot).copy_from(content(pool, reservation.hashes[page]))
    controller.commit(reservation, without=without)
    return reservation.pages


def recompute(lease: Lease, name: str) -> list[int]:
    """The draft fills the pages that it lacks; which these were."""
    pool = lease.cache.pools[lease.cache.pool_set.number(name)]
    claimed = lease.claim(name)
    for page, slot in claimed.items():
        pool.host.page(slot).copy_from(content(pool, lease.entries[page].page_hash))
    lease.fill(name, claimed)
    return list(claimed)


def is_right(lease: Lease) -> bool:
    """Whether every leased page of every pool holds what its key says."""
    return all(
        pool.host.page(slot).tobytes() == content(pool, lease.entries[page].page_hash)
        for pool, pages, slots in zip(lease.cache.pools, lease.indices, lease.slots, strict=True)
        for page, slot in zip(pages, slots, strict=True)
    )


def free_slots(controller: CacheController) -> list[int]:
    """Free slots of each pool."""
    return [pool.host.free_slots for pool in controller.cache.pools]


def leaked(controller: CacheController) -> list[str]:
    """What a controller that has nothing to do still holds: nothing, if all is well."""
    held = [f"{pages} pinned pages" for pages in [controller.cache.clear()] if pages]
    held += [
        f"{pool.host.slots - pool.host.free_slots} slots of {pool.space.pool}"
        for pool in controller.cache.pools
        if pool.host.free_slots < pool.host.slots
    ]
    occupied = controller._context.occupancy.pages
    return held + [f"{occupied} pages of prefetch capacity"] * bool(occupied)


def lost_pages(controller: CacheController) -> int:
    """Pages that were to be written, and that the store has not got in every pool."""
    counted = controller.stats()
    return sum(counted.get(name, 0) for name in ("dropped_pages", "unwritten_pages"))


def is_truth(controller: CacheController, end: Callable[[], bool]) -> bool:
    """Whether `end`, a drain or a close, says True exactly where no page is lost by it."""
    before = lost_pages(controller)
    return end() == (lost_pages(controller) == before)


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does; the test's own timeout ends it."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


class ThreadRanks:
    """Ranks that are threads of one process: `of(size)` gives one for each."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.rank = rank
        self.size = size
        self._table = table

    @classmethod
    def of(cls, size: int, timeout_s: float = 20) -> list[Self]:
        """All of them."""
        table = _Table(size, timeout_s)
        return [cls(rank, size, table) for rank in range(size)]

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """As the protocol says."""
        return self._table.all_reduce_min(channel, self.rank, values)

    def close(self) -> None:
        """Nothing to let go of."""


class _Table:
    """Where they put their answers, a round at a time on each channel."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[tuple[Channel, int], dict[int, Sequence[int]]] = {}
        self._turn: dict[tuple[Channel, int], int] = {}

    def all_reduce_min(self, channel: Channel, rank: int, values: Sequence[int]) -> list[int]:
        with self._changed:
            turn = self._turn.get((channel, rank), 0)
            self._turn[channel, rank] = turn + 1
            answers = self._rounds.setdefault((channel, turn), {})
            answers[rank] = list(values)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(answers) == self._size, self._timeout_s):
                raise RanksLost(f"rank {rank} waited {self._timeout_s} s for the others")
            if len({len(answer) for answer in answers.values()}) != 1:
                raise RanksLost("the ranks gave answers of different lengths")
            return [min(column) for column in zip(*answers.values(), strict=True)]
