"""Caches that each have one fault, and work that shows it in the metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import job_runners
from framed import TARGET, framed
from hicache_backends.memory import MemoryStorage
from hicache_backends.tiered import TieredSettings, TieredStorage
from job_runners import batch
from pages import hash_of

from hicache_storage.metrics import CacheView, ViewCollector
from hicache_storage.page_store import PageStore, PageStoreSettings, PoolSpec, Transfer
from hicache_storage.testing import Fault, FaultyStorage, Odds

_PAGES = [hash_of(number) for number in range(4)]


@dataclass(frozen=True)
class FaultyCache:
    """A cache with one fault, whose name is the label `backend`."""

    name: str
    alerts: tuple[str, ...]
    """The alerts that the fault must raise."""
    odds: Odds | None
    work: Callable[[PageStore], object]


def _save(store: PageStore) -> None:
    store.save([Transfer(TARGET, _PAGES, [framed(1) for _ in _PAGES])])


def _load(store: PageStore) -> None:
    store.load([Transfer(TARGET, _PAGES, [framed(1) for _ in _PAGES])])


def _save_and_load(store: PageStore) -> None:
    _save(store)
    _load(store)


def _look_up(store: PageStore) -> None:
    store.match(_PAGES, [PoolSpec(space=TARGET)])


def _write_only(numbers: Iterator[int], store: PageStore) -> None:
    hashes = [hash_of(next(numbers)) for _ in range(100)]
    store.save([Transfer(TARGET, hashes, [framed(1) for _ in hashes])])


def _always(operation: str, fault: Fault) -> Odds:
    return Odds(operation, fault, 1.0)


FAULTY = [
    FaultyCache("sound", (), None, _save_and_load),
    FaultyCache(
        "unreadable",
        ("HiCacheBreakerOpen", "HiCacheLoadsFail"),
        _always("batch_get", Fault.RAISE),
        _load,
    ),
    FaultyCache(
        "mute",
        ("HiCacheBreakerOpen", "HiCacheLookupsFail"),
        _always("batch_exists", Fault.RAISE),
        _look_up,
    ),
    FaultyCache(
        "unwritable",
        ("HiCacheBreakerOpen", "HiCacheSavesFail"),
        _always("batch_set", Fault.RAISE),
        _save,
    ),
    FaultyCache("full", ("HiCacheSavesRefused",), _always("batch_set", Fault.MISS), _save),
    FaultyCache(
        "damaged", ("HiCacheWrongPages",), _always("batch_get", Fault.FLIP), _save_and_load
    ),
    FaultyCache("slow", ("HiCacheSlowLoads",), _always("batch_get", Fault.DELAY), _save_and_load),
    FaultyCache("unread", ("HiCacheNeverRead",), None, partial(_write_only, count())),
]
TIERED = "tiered"
"""The name of a cache of two tiers, of which the lower one cannot be written."""
SMALL_TIER, FEW_COPIES = "small-tier", "few-copies"
"""The names of caches of two tiers: the upper one is full, or the lower one gets no copies."""
OVERRUN = "overrun"
"""The name of a job runner whose store refuses all pages, so that the runner drops them."""


@contextmanager
def faulty_caches() -> Generator[ViewCollector]:
    """Yield the metrics of all faulty caches. They work until the end of the block."""
    collector = ViewCollector(["backend"])
    stop = threading.Event()
    with ExitStack() as opened:
        works: list[Callable[[], object]] = []
        for cache in FAULTY:
            plan = [] if cache.odds is None else [cache.odds]
            storage = FaultyStorage(MemoryStorage.from_config({}), plan, delay_s=1.2)
            opened.callback(storage.close)
            store = opened.enter_context(PageStore(storage, PageStoreSettings(timeout_s=5)))
            store.open_space(TARGET)
            collector.watch(partial(CacheView, store=store), {"backend": cache.name})
            works.append(partial(cache.work, store))
        works += [
            _overrun(collector, opened),
            _tiered(collector, opened, TIERED, [_always("batch_set", Fault.RAISE)]),
            _tiered(collector, opened, SMALL_TIER, [], ram="4KiB"),
            _tiered(collector, opened, FEW_COPIES, [], write="back", copy_nbytes=1),
        ]
        threads = [threading.Thread(target=_repeat, args=(work, stop)) for work in works]
        for thread in threads:
            thread.start()
            opened.callback(thread.join)
        opened.callback(stop.set)
        yield collector


def _overrun(collector: ViewCollector, opened: ExitStack) -> Callable[[], object]:
    hang = [_always("batch_set", Fault.HANG)]
    engine = opened.enter_context(job_runners.engine(hang, queued_nbytes="64KiB"))
    collector.watch(
        lambda: CacheView(store=engine.store, attached=True, engine=engine.runner.stats()),
        {"backend": OVERRUN},
    )
    numbers = count()
    return lambda: engine.runner.submit_store(next(numbers), [batch(range(8))])


def _tiered(
    collector: ViewCollector,
    opened: ExitStack,
    name: str,
    faults: list[Odds],
    *,
    ram: str = "64MiB",
    **fields: Any,
) -> Callable[[], object]:
    below = FaultyStorage(MemoryStorage.from_config({}), faults)
    tiers = {"ram": MemoryStorage.from_config({"capacity_nbytes": ram}), "below": below}
    members = [{"name": each, "backend": "memory"} for each in tiers]
    settings = TieredSettings.parse("tiered", {"tiers": members, **fields})
    storage = opened.enter_context(TieredStorage(tiers, settings))
    store = opened.enter_context(PageStore(storage, PageStoreSettings(timeout_s=5)))
    store.open_space(TARGET)
    collector.watch(lambda: CacheView(store=store), {"backend": name})
    return partial(_save_and_load if faults else partial(_write_only, count()), store)


def _repeat(work: Callable[[], object], stop: threading.Event) -> None:
    while not stop.wait(0.1):
        work()
