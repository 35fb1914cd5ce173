"""Whole scenarios, once for each call that could have failed and each way in which it could."""

from __future__ import annotations

import pytest
from engines import PROMPT, cache_pools, compute, free_slots, is_right
from hicache_backends.memory import MemoryStorage
from hicache_conformance import Fault, FaultyStorage, Strike
from pages import hash_of

from hicache_storage.controller import CacheController, ControllerSettings, PrefetchPolicy
from hicache_storage.page_store import PageStore, PageStoreSettings

OTHER = PROMPT[:6] + [hash_of(500 + number) for number in range(6)]
SETTINGS = ControllerSettings(
    prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0, batch_pages=8
)
# Calls of each operation that the scenario makes when nothing fails; the test below keeps it true.
CALLS = {"batch_exists": 10, "batch_get": 12, "batch_set": 6}


def scenario(storage: FaultyStorage) -> tuple[int, int]:
    """Three engines, one after another, on two prompts with one head: wrong prefixes, leaked slots."""
    wrong = leaked = 0
    for _ in range(3):
        settings = PageStoreSettings(timeout_s=0.2, parallelism=1, breaker_failures=100)
        with PageStore(storage, settings) as store:
            controller = CacheController(store, cache_pools(), SETTINGS)
            with controller:
                for prompt in (PROMPT, OTHER):
                    with controller.prefetch("request", prompt).result() as lease:
                        wrong += not is_right(lease)
                        missing = prompt[lease.pages :]
                    compute(controller, missing)
                    assert controller.drain(20)
                storage.release()
        # The store has ended its threads by now: whatever hung has come back.
        leaked += controller.cache.clear()
        leaked += sum(32 - free for free in free_slots(controller))
    return wrong, leaked


def test_the_scenario_makes_these_calls() -> None:
    storage = FaultyStorage(MemoryStorage())

    assert scenario(storage) == (0, 0)
    assert CALLS == dict(storage.calls)


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
@pytest.mark.parametrize(
    ("operation", "call"),
    [(operation, call) for operation, calls in CALLS.items() for call in range(calls)],
)
def test_no_single_fault_gives_a_wrong_page_or_leaks_a_slot(
    operation: str, call: int, fault: Fault
) -> None:
    storage = FaultyStorage(MemoryStorage(), [Strike(operation, call, fault)], seed=call)

    assert scenario(storage) == (0, 0)
    assert storage.calls[operation] > call
