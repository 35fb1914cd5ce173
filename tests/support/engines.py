"""An engine for tests of the controller: its pools, and pages whose bytes follow from their key."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from clocks import in_time
from pages import hash_of, space
from stores import HookedStorage

from hicache_storage.controller import (
    CacheController,
    CachePool,
    Channel,
    ControllerSettings,
    Lease,
    PrefetchPolicy,
    RanksLost,
)
from hicache_storage.host_pool import HostPool, PageShape
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import Observer, PageStore, PageStoreSettings
from hicache_storage.page_store.admission import Admission
from hicache_storage.page_store.lookup import HitPolicy
from hicache_storage.request_log import ExplainLog
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
    """Return a pool of small pages. `more` has further fields of `CachePool`."""
    return CachePool(
        space=space(pool=name, page_tokens=PAGE_TOKENS, page_nbytes=shape.nbytes),
        host=HostPool(shape, slots=slots),
        **more,
    )


def cache_pools(slots: int = 32, *, draft_slots: int | None = None) -> list[CachePool]:
    """Return a target pool and a draft pool, both required."""
    return [
        cache_pool("kv", TARGET_SHAPE, slots),
        cache_pool("draft", DRAFT_SHAPE, draft_slots or slots),
    ]


def optional_draft(slots: int = 32) -> list[CachePool]:
    """Return a target pool and an optional draft pool."""
    return [
        cache_pool("kv", TARGET_SHAPE, slots),
        cache_pool("draft", DRAFT_SHAPE, slots, required=False),
    ]


def windowed(slots: int = 32, *, window_pages: int = 2, window_slots: int = 8) -> list[CachePool]:
    """Return a target pool, an optional draft pool and a sliding-window pool."""
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
    admission: Admission | None = None,
    explain_log: ExplainLog | None = None,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> Generator[CacheController]:
    """Yield an engine with its own L2. A prefetch waits for all pages unless `settings` change that."""
    with ExitStack() as stack:
        store = (
            None
            if storage is None
            else stack.enter_context(page_store(storage, timeout_s, observers))
        )
        chosen: dict[str, Any] = {
            "prefetch_policy": PrefetchPolicy.WAIT_COMPLETE,
            "prefetch_threshold_tokens": 0,
            "batch_pages": 4,
            **settings,
        }
        controller = in_time(
            lambda: CacheController(
                store,
                pools,
                ControllerSettings(**chosen),
                ranks=ranks,
                admission=admission,
                explain_log=explain_log,
            )
        )
        yield stack.enter_context(controller)


def page_store(
    storage: HiCacheStorage, timeout_s: float = 20, observers: Sequence[Observer] = ()
) -> PageStore:
    """Return a page store whose breaker never opens in a test."""
    settings = PageStoreSettings(timeout_s=timeout_s, breaker_failures=1000)
    return PageStore(storage, settings, observers=observers)


def content_in(key_space: KeySpace, page_hash: str) -> bytes:
    """Return the bytes of a page, which depend only on its key space and hash."""
    seed = hashlib.sha256(f"{key_space.id}{page_hash}".encode()).digest()
    return (seed * (key_space.page_nbytes // len(seed) + 1))[: key_space.page_nbytes]


def content(pool: CachePool, page_hash: str) -> bytes:
    """Return the bytes of a page in a pool whose pages are not divided among ranks."""
    return content_in(pool.space, page_hash)


def compute(
    controller: CacheController,
    hashes: Sequence[str],
    *,
    timeout_s: float = 20,
    ends: Collection[int] | None = None,
    without: Collection[str] = (),
) -> int:
    """Fill new pages in every pool and commit them. Return how many pages had slots."""
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
    """Fill the pages of a lease that a pool lacks. Return their indices."""
    pool = lease.cache.pools[lease.cache.pool_set.number(name)]
    claimed = lease.claim(name)
    for page, slot in claimed.items():
        pool.host.page(slot).copy_from(content(pool, lease.entries[page].page_hash))
    lease.fill(name, claimed)
    return list(claimed)


def is_right(lease: Lease) -> bool:
    """Return True if every leased page of every pool has the content of its key."""
    return all(
        pool.host.page(slot).tobytes() == content(pool, lease.entries[page].page_hash)
        for pool, pages, slots in zip(lease.cache.pools, lease.indices, lease.slots, strict=True)
        for page, slot in zip(pages, slots, strict=True)
    )


def free_slots(controller: CacheController) -> list[int]:
    """Return how many slots of each pool are free."""
    return [pool.host.free_slots for pool in controller.cache.pools]


def leaked(controller: CacheController) -> list[str]:
    """Return the pages, slots and quota that an idle controller still holds, which should be none."""
    held = [f"{pages} pinned pages" for pages in [controller.cache.clear()] if pages]
    held += [
        f"{pool.host.slots - pool.host.free_slots} slots of {pool.space.pool}"
        for pool in controller.cache.pools
        if pool.host.free_slots < pool.host.slots
    ]
    acquired = controller._context.quota.pages
    return held + [f"{acquired} pages of prefetch capacity"] * bool(acquired)


def lost_pages(controller: CacheController) -> int:
    """Return how many pages should have been written, but are missing from the store in some pool."""
    counted = controller.stats()
    return sum(counted.get(name, 0) for name in ("dropped_pages", "unwritten_pages"))


def reports_losses(controller: CacheController, end: Callable[[], bool]) -> bool:
    """Return True if `end`, a drain or a close, returns True exactly if it loses no page."""
    before = lost_pages(controller)
    return end() == (lost_pages(controller) == before)


def delete_pages(storage: HookedStorage, pool: str, hashes: Sequence[str]) -> None:
    """Delete pages of a pool from a storage without its hooks."""
    (key_space,) = (each for each in storage.inner.spaces() if each.pool == pool)
    storage.inner.batch_delete(key_space, hashes)


def on_each_rank(act: Callable[[int], Any], size: int, *, timeout_s: float) -> list[Any]:
    """Run `act` in a thread for each rank. Return the results."""
    executor = ThreadPoolExecutor(size)
    try:
        futures = [executor.submit(act, rank) for rank in range(size)]
        wait(futures, timeout_s)
        return [future.result(0) for future in futures]
    finally:
        executor.shutdown(wait=False)


def until(condition: Callable[[], object]) -> None:
    """Wait until another thread makes `condition` true. The test's own timeout ends the wait."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


class ThreadRanks:
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, size: int, reduction: _AllReduce) -> None:
        self.rank = rank
        self.size = size
        self._reduction = reduction

    @classmethod
    def of(cls, size: int, timeout_s: float = 20) -> list[Self]:
        """Return all ranks of an engine."""
        reduction = _AllReduce(size, timeout_s)
        return [cls(rank, size, reduction) for rank in range(size)]

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each value."""
        return self._reduction.all_reduce_min(channel, self.rank, values)

    def close(self) -> None:
        """Do nothing."""


class _AllReduce:
    """The values that ranks contribute on each channel, round by round."""

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
