"""Requests of several clients to one engine, while its stores fail, leave and come back."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engines import compute, engine_on, is_right, lost_pages, page_store, recompute, windowed
from hicache_backends.memory import MemoryStorage
from pages import hash_of

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller import PartialHits, PrefetchPolicy
from hicache_storage.errors import StorageTimeout
from hicache_storage.testing import Fault, FaultyStorage, Strike

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Generator

    from hicache_storage.controller import CacheController

CLIENTS = 4
PROMPTS = [[hash_of(100 * prompt + page) for page in range(6)] for prompt in range(24)]
FAULTS = (Fault.RAISE, Fault.MISS, Fault.LIE, Fault.TEAR, Fault.FLIP)
TIMEOUT_S = 0.02
GROWTH_NBYTES = 16 << 20
"""More than the heap varies normally, but less than a small leak per request adds up to."""
EVENTS = (
    "l2_hit_pages",
    "l3_hit_pages",
    "cancelled_requests",
    "target_only_pages",
    "loaded_pages",
    "written_pages",
    "unwritten_pages",
    "evicted_pages",
)
VERDICTS = ("load_timeout", "load_corrupt", "load_unavailable", "save_refused")
EVENTS_LIMIT_S = 60
"""After this time, requests no longer continue just because an event has not happened yet."""


def flapping_storage(seed: int, calls: int = 500_000) -> FaultyStorage:
    """Return a storage that fails two calls in a hundred, and delays one in a thousand too long.

    After `calls` calls of an operation it no longer fails.
    """
    chance = random.Random(seed)
    strikes: list[Strike] = []
    for operation in ("batch_exists", "batch_get", "batch_set", "batch_delete"):
        for call in range(calls):
            if (draw := chance.random()) < 0.021:
                fault = Fault.DELAY if draw < 0.001 else chance.choice(FAULTS)
                strikes.append(Strike(operation, call, fault))
        strikes.append(Strike(operation, 40, Fault.DELAY))  # also in a short run
    return FaultyStorage(MemoryStorage(), strikes, seed=seed, delay_s=2 * TIMEOUT_S)


def serve(engine: CacheController, chance: random.Random, request_id: str) -> str | None:
    """Serve a request, which may be cancelled. Return a problem or None."""
    prompt = chance.choice(PROMPTS)[: chance.randint(1, 6)]
    deadline_s = chance.choice([None, None, None, 0.0, 0.001])
    prefetch = engine.prefetch(request_id, prompt, deadline_s=deadline_s)
    if chance.random() < 0.1:
        prefetch.cancel()
        return None
    with prefetch.result() as lease:
        if not is_right(lease):
            return f"request {request_id} was given a wrong page"
        if chance.random() < 0.5:
            recompute(lease, "draft")
        missing = prompt[lease.pages :]
    compute(engine, missing, timeout_s=0, without=["draft"] if chance.random() < 0.2 else ())
    return None


def missing_events(engine: CacheController, seen: Counter[str]) -> list[str]:
    """Return the events that the engine has not counted, and the verdicts that no store has given."""
    counted = engine.stats()
    return [name for name in EVENTS if not counted.get(name)] + [
        name for name in VERDICTS if not seen[name]
    ]


def soaked(
    engine: CacheController,
    requests: int,
    stores: list[FaultyStorage],
    seen: Counter[str],
    seed: int = 0,
) -> tuple[int, list[str]]:
    """Serve several clients while stores are attached and detached. Return requests and problems.

    A busy machine may attach no store while `requests` are served, so the clients continue until
    every event has happened. `seen` counts verdicts.
    """
    served: list[int] = []
    wrong: list[str] = []
    deadline = Deadline(EVENTS_LIMIT_S)

    def client(number: int) -> None:
        chance = random.Random(seed * CLIENTS + number)
        turn = 0
        while turn < requests // CLIENTS or (
            deadline.remaining_s() and missing_events(engine, seen)
        ):
            try:
                problem = serve(engine, chance, f"{number}-{turn}")
            except Exception as error:  # noqa: BLE001 - reported
                problem = repr(error)
            if problem:
                wrong.append(problem)
            turn += 1
        served.append(turn)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    turn = 0
    while any(thread.is_alive() for thread in threads):
        turn += 1
        lost_before = lost_pages(engine)
        with page_store(stores[turn % len(stores)], TIMEOUT_S) as store:
            try:
                engine.attach(store)
            except StorageTimeout:  # the machine is busy: attach no store this time
                threads[0].join(0.3)
                continue
            threads[0].join(0.3)
            whole = engine.detach(drain=bool(turn % 2), timeout_s=30)
            wrong += [] if whole or lost_pages(engine) > lost_before else ["no detach"]
            seen.update(store.stats())
    return sum(served), wrong


@contextmanager
def soaking_engine() -> Generator[CacheController]:
    """Yield an engine with three pools and no store, small enough to evict all the time."""
    with engine_on(
        None,
        windowed(40, window_slots=12),
        prefetch_policy=PrefetchPolicy.TIMEOUT,
        partial_hits=PartialHits.TAKE_TARGET,
        prefetch_threads=2,
        batch_pages=2,
        inflight_nbytes=1 << 13,
        write_queue_pages=16,
    ) as engine:
        yield engine
