"""Scenarios that are run once for each storage call and each fault of the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pytest
from clocks import in_time
from engines import (
    PROMPT,
    cache_pools,
    compute,
    engine_on,
    is_right,
    leaked,
    optional_draft,
    page_store,
    recompute,
    reports_losses,
    windowed,
)
from hicache_backends.memory import MemoryStorage
from hicache_conformance import Fault, FaultyStorage, Strike
from pages import hash_of

from hicache_storage.controller import CacheController, PartialHits, PrefetchPolicy, WritePolicy

Problems: TypeAlias = Iterator[str]
Scenario: TypeAlias = Callable[["FaultyStorage", float], Problems]

HEAD = PROMPT[:8]
OTHER = HEAD[:3] + [hash_of(500 + number) for number in range(4)]


def served(engine: CacheController, request_id: str, prompt: Sequence[str]) -> Problems:
    """Serve a request: check the pages found, and compute the others. Return the problems."""
    with engine.prefetch(request_id, prompt).result() as lease:
        if not is_right(lease):
            yield f"request {request_id} was given a wrong page"
        missing = prompt[lease.pages :]
    compute(engine, missing)
    if not reports_losses(engine, lambda: engine.drain(20)):
        yield "the write queue does not run dry, or a page was lost in silence"


def finished(engine: CacheController, storage: FaultyStorage) -> Problems:
    """End the calls that hang, and close the engine. Return the problems."""
    storage.release()
    if not reports_losses(engine, lambda: engine.close(timeout_s=20)):
        yield "the controller does not close, or a page was lost in silence"
    yield from leaked(engine)


def two_prompts(storage: FaultyStorage, timeout_s: float, **how: Any) -> Problems:
    """Serve two prompts with a common head on two engines, one after the other."""
    pools = how.pop("pools", cache_pools)
    for _ in range(2):
        with engine_on(storage, pools(), timeout_s=timeout_s, **how) as engine:
            for prompt in (HEAD, OTHER):
                yield from served(engine, "r", prompt)
            yield from finished(engine, storage)


def optional_drafts(storage: FaultyStorage, timeout_s: float) -> Problems:
    """Serve a prompt without a draft, then on an engine that takes the target and fills the draft."""
    taking: dict[str, Any] = {"partial_hits": PartialHits.TAKE_TARGET, "timeout_s": timeout_s}
    with engine_on(storage, optional_draft(), **taking) as engine:
        compute(engine, HEAD[:5], without=["draft"])
        compute(engine, HEAD[5:])
        engine.drain(20)
        yield from finished(engine, storage)
    for _ in range(2):
        with engine_on(storage, optional_draft(), **taking) as engine:
            with engine.prefetch("r", HEAD).result() as lease:
                if not is_right(lease):
                    yield "a wrong page"
                recompute(lease, "draft")
                missing = HEAD[lease.pages :]
            compute(engine, missing)
            engine.drain(20)
            yield from served(engine, "again", HEAD)
            yield from finished(engine, storage)


def detached_in_the_middle(storage: FaultyStorage, timeout_s: float) -> Problems:
    """Detach the store while pages are being loaded and written, and attach it again."""
    with (
        engine_on(storage, cache_pools(), timeout_s=timeout_s) as first,
        engine_on(storage, cache_pools(), timeout_s=timeout_s) as engine,
        page_store(storage, timeout_s) as store,
    ):
        yield from served(first, "first", HEAD)
        prefetch = engine.prefetch("r", HEAD)
        compute(engine, OTHER[3:])
        engine.detach(drain=False, timeout_s=0.001)
        with prefetch.result() as lease:
            if not is_right(lease):
                yield "a wrong page"
        yield from served(engine, "without", OTHER)
        in_time(lambda: engine.attach(store))
        yield from served(engine, "back", HEAD)
        yield from finished(first, storage)
        yield from finished(engine, storage)


def cancelled(storage: FaultyStorage, timeout_s: float) -> Problems:
    """Cancel requests before their pages arrive, meanwhile and afterwards."""
    with engine_on(storage, cache_pools(), timeout_s=timeout_s) as engine:
        yield from served(engine, "first", HEAD)
        yield from finished(engine, storage)
    how: dict[str, Any] = {
        "timeout_s": timeout_s,
        "prefetch_policy": PrefetchPolicy.BEST_EFFORT,
        "batch_pages": 2,
    }
    with engine_on(storage, cache_pools(), **how) as engine:
        engine.prefetch("at once", HEAD).cancel()
        late = engine.prefetch("late", HEAD)
        with engine.prefetch("best effort", OTHER).result() as lease:
            if not is_right(lease):
                yield "a wrong page"
        late._job._complete.wait(20)
        late.cancel()
        yield from served(engine, "next", HEAD)
        yield from finished(engine, storage)


SCENARIOS: dict[str, Scenario] = {
    "two prompts": two_prompts,
    "write back": lambda storage, timeout_s: two_prompts(
        storage,
        timeout_s,
        pools=lambda: cache_pools(10),
        write_policy=WritePolicy.WRITE_BACK,
        inflight_nbytes=1 << 14,
    ),
    "optional draft": optional_drafts,
    "trailing pool": lambda storage, timeout_s: two_prompts(
        storage, timeout_s, pools=lambda: windowed(12, window_slots=4)
    ),
    "detached in the middle": detached_in_the_middle,
    "cancelled": cancelled,
}
AMPLE_S = 20.0
HANGING_S = 0.1
"""The timeout in scenarios in which a call hangs. On a busy machine, other calls may exceed it."""


def run_scenario(scenario: Scenario, strikes: Sequence[Strike], timeout_s: float) -> FaultyStorage:
    seed = sum(strike.call for strike in strikes)
    storage = FaultyStorage(MemoryStorage(), strikes, seed=seed, delay_s=0.001)
    assert not list(scenario(storage, timeout_s)), strikes
    return storage


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_single_fault_gives_a_wrong_page_or_leaks_anything(name: str, fault: Fault) -> None:
    scenario = SCENARIOS[name]
    calls = dict(run_scenario(scenario, [], AMPLE_S).calls)
    assert {"batch_exists", "batch_get", "batch_set"} <= calls.keys()
    timeout_s = HANGING_S if fault is Fault.HANG else AMPLE_S

    for operation, count in calls.items():
        for call in range(count):
            run_scenario(scenario, [Strike(operation, call, fault)], timeout_s)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_store_that_fails_at_every_other_call_costs_hits_only(name: str) -> None:
    """Every second call of the store fails, with each kind of fault that fails at once."""
    for fault in (Fault.RAISE, Fault.MISS, Fault.LIE, Fault.TEAR, Fault.FLIP):
        strikes = [
            Strike(operation, call, fault)
            for operation in ("batch_exists", "batch_get", "batch_set", "batch_delete")
            for call in range(0, 100, 2)
        ]
        run_scenario(SCENARIOS[name], strikes, AMPLE_S)
