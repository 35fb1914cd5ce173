"""Whole scenarios in vLLM's engine core, repeated with a fault at each storage call in turn."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from given_storage import STORAGES, given
from hicache_backends.memory import MemoryStorage
from servers import wait_until
from vllm_engine import BLOCK, FULL, PROMPT, Engine

from hicache_storage.testing import Fault, FaultyStorage, Odds, Strike

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Generator, Iterable

WINDOW = 2 * BLOCK
LONGER = [*PROMPT][:FULL] + [9] * 2 * BLOCK
LIMITS = {"lookup_timeout_s": 0.15, "load_timeout_s": 0.3, "store_timeout_s": 0.3}
HELD_S = LIMITS["lookup_timeout_s"] + LIMITS["load_timeout_s"] + 1.5
"""A hanging load of a bounded store ends a second after its deadline; the rest is for busy machines."""
HANG_S = 1.0


@contextmanager
def engine_over(class_name: str, window: int | None) -> Generator[Engine]:
    """Yield an engine for several scenarios, each with a storage of its own."""
    STORAGES["faulty"] = MemoryStorage()
    config: dict[str, Any] = {**given("faulty", class_name), **LIMITS}
    try:
        with Engine(config, window=window) as engine:
            yield engine
            assert engine.tier._metrics.errors == 0
    finally:
        del STORAGES["faulty"]


def play(engine: Engine, plan: Iterable[Strike | Odds] = (), seed: int = 0) -> FaultyStorage:
    """Write a prefix, read it cold, and read a longer prefix, on an empty storage with these faults.

    Every answer is right, no request is held beyond its deadlines, and no error reaches the engine.
    """
    memory = MemoryStorage()
    store = engine.tier._connection.store
    for space in engine.tier._groups.spaces.values():
        if store.has_space(space):
            memory.open_space(store.framed(space))
    engine.forget_host()
    with FaultyStorage(memory, plan, seed=seed, hang_s=HANG_S) as storage:
        store.storage.inner = storage
        for prompt in (PROMPT, PROMPT, LONGER):
            answer = engine.write(prompt)
            engine.forget_host()
            assert (answer.wrong, answer.finished) == (0, True)
            assert answer.held_s is not None
            assert answer.held_s < HELD_S
        assert not engine.tier._jobs
        storage.release()
        runner = engine.tier._connection.runner
        wait_until(lambda: runner.stats()["private_nbytes_used"] == 0)
        store.storage.inner = memory
    for breaker in (store.breaker.reads, store.breaker.writes):
        breaker.record(succeeded=True)  # a scenario is not to suffer from the one before
    return storage


def calls_of(engine: Engine) -> Counter[str]:
    """Return the calls of a scenario that no deadline cut short: it comes twice in a row."""
    before, calls = play(engine).calls, play(engine).calls
    while before != calls:
        before, calls = calls, play(engine).calls
    return calls


def strikes(engine: Engine, strike: Strike) -> bool:
    """Return whether the call was made. On a busy machine, a deadline may pass before it."""
    return play(engine, [strike]).struck[strike.operation, strike.fault] == 1


@pytest.mark.parametrize("class_name", ["GivenStorage", "BoundedStorage"])
def test_one_fault_at_each_call(class_name: str) -> None:
    with engine_over(class_name, None) as engine:
        for operation, calls in calls_of(engine).items():
            assert calls >= 1
            for fault in Fault:
                if fault is Fault.HANG and class_name == "BoundedStorage":
                    continue  # such a store is not bounded
                for call in range(calls):
                    wait_until(partial(strikes, engine, Strike(operation, call, fault)))


def test_one_fault_at_each_call_with_a_window() -> None:
    with engine_over("GivenStorage", WINDOW) as engine:
        for operation, calls in calls_of(engine).items():
            for fault in (Fault.RAISE, Fault.LIE, Fault.FLIP, Fault.HANG):
                for call in range(calls):
                    play(engine, [Strike(operation, call, fault)])


def test_faults_at_a_third_of_all_calls() -> None:
    odds = [
        Odds(operation, fault, 0.05)
        for operation in ("batch_exists", "batch_get", "batch_set", "batch_delete")
        for fault in Fault
    ]
    with engine_over("GivenStorage", None) as engine:
        calls_of(engine)
        for seed in range(10):
            play(engine, odds, seed)
