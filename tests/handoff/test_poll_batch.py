"""Polls of requests that several ranks await: one all-reduce serves all requests, and none raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from engines import (
    PROMPT,
    ThreadRanks,
    cache_pools,
    compute,
    engine_on,
    leaked,
    on_each_rank,
    page_store,
    until,
)
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from stores import Gate, HookedStorage

from hicache_storage.controller import CacheController, Channel, SingleRank
from hicache_storage.handoff import HandoffReceiver, HandoffRequest, HandoffSender, HandoffSettings

# The loads are far apart, so that only the polls are counted.
RARELY = HandoffSettings(timeout_s=500, load_every_s=400, stale_after_s=1000)


class CountingRanks(ThreadRanks):
    """Ranks that count the all-reduces of the engine's thread."""

    all_reduces = 0

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        self.all_reduces += channel is Channel.RESULT
        return super().all_reduce_min(channel, values)


class Decode:
    """The two ranks of a decode engine over one storage. Each rank has a receiver."""

    def __init__(self, stack: ExitStack, storage: MemoryStorage, settings: HandoffSettings) -> None:
        self.ranks = CountingRanks.of(2, timeout_s=30)
        self.engines = [
            stack.enter_context(engine_on(storage, cache_pools(), ranks=rank))
            for rank in self.ranks
        ]
        self.receivers: list[HandoffReceiver] = []
        for engine in self.engines:
            store = stack.enter_context(page_store(storage))
            for pool in engine.cache.pools:
                store.open_space(pool.space)
            self.receivers.append(stack.enter_context(HandoffReceiver(engine, store, settings)))

    def on_each_rank(self, act: Callable[[int, HandoffReceiver], Any]) -> list[Any]:
        """Run `act` in a thread of each rank. Return the results and errors."""

        def run(rank: int) -> Any:
            try:
                return act(rank, self.receivers[rank])
            except Exception as error:  # noqa: BLE001 - the test checks the error
                return error

        return on_each_rank(run, len(self.receivers), timeout_s=100)


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    with MemoryStorage() as opened:
        yield opened


@pytest.fixture
def decode(storage: MemoryStorage) -> Iterator[Callable[..., Decode]]:
    with ExitStack() as stack:

        def make(settings: HandoffSettings = RARELY) -> Decode:
            return Decode(stack, storage, settings)

        yield make


def prompt_of(number: int) -> list[str]:
    return [*PROMPT[:3], hash_of(1000 + number)]


def published(storage: MemoryStorage, *numbers: int) -> None:
    """Compute and publish some requests on a prefill engine of one rank."""
    with engine_on(storage, cache_pools()) as engine, page_store(storage) as store:
        for pool in engine.cache.pools:
            store.open_space(pool.space)
        with HandoffSender(engine, store) as sender:
            for number in numbers:
                compute(engine, prompt_of(number))
                assert sender.publish(f"{number}", prompt_of(number)).result(30) == 4


@pytest.mark.parametrize("requests", [1, 10, 50])
def test_a_pass_over_all_requests_is_one_collective(
    decode: Callable[..., Decode], requests: int
) -> None:
    engine = decode()

    def act(rank: int, receiver: HandoffReceiver) -> list[int]:
        awaited = [receiver.expect(f"{n}", prompt_of(n)) for n in range(requests)]
        until(lambda: all(each._prefetch.complete for each in awaited))
        counts = [engine.ranks[rank].all_reduces]
        for _ in range(3):
            for each in awaited:
                assert not each.poll()
            counts.append(engine.ranks[rank].all_reduces)
        for each in awaited:
            each.cancel()
        return [after - before for before, after in pairwise(counts)]

    assert [[1, 1, 1]] * 2 == engine.on_each_rank(act)


def test_requests_come_and_go_between_polls(
    decode: Callable[..., Decode], storage: MemoryStorage
) -> None:
    """Some requests are taken, some cancelled, some start late, and some wait longer than others."""
    published(storage, *range(12))
    engine = decode()

    def act(rank: int, receiver: HandoffReceiver) -> list[int]:
        awaited = {n: receiver.expect(f"{n}", prompt_of(n)) for n in range(8)}
        found: list[int] = []

        def take(number: int) -> None:
            with awaited.pop(number).result() as lease:
                found.append(lease.pages)

        take(5)
        awaited.pop(2).cancel()
        for number in range(8, 12):
            awaited[number] = receiver.expect(f"{number}", prompt_of(number))
        until(lambda: not any(each.missing for each in awaited.values()))
        while awaited:
            ready = [number for number, each in awaited.items() if each.poll()]
            found.append(-len(ready))
            for number in ready:
                take(number)
        return found

    results = engine.on_each_rank(act)

    assert results[0] == results[1]
    assert results[0].count(4) == 11
    assert not [leaked(each) for each in engine.engines if leaked(each)]


def test_another_prefetch_of_a_request_is_no_collective(
    decode: Callable[..., Decode], storage: MemoryStorage
) -> None:
    """The ranks use an all-reduce for the polls and the end of a request, but for no prefetch before."""
    published(storage, 0)
    engine = decode()

    def act(rank: int, receiver: HandoffReceiver) -> Any:
        request = receiver.expect("0", prompt_of(0))
        until(lambda: not request.missing)
        polls = 0
        while not request.poll():
            polls += 1
            until(lambda: request._prefetch.complete)
        counts = engine.ranks[rank].all_reduces - (polls + 1)
        with request.result() as lease:
            return counts, lease.pages, lease.l3_pages

    assert [(0, 4, 4)] * 2 == engine.on_each_rank(act)


def test_ranks_that_await_different_requests_are_lost_and_raise_nothing(
    decode: Callable[..., Decode],
) -> None:
    engine = decode()

    def act(rank: int, receiver: HandoffReceiver) -> int:
        request = receiver.expect("0", prompt_of(rank))
        with request.result() as lease:
            return lease.pages

    assert [0, 0] == engine.on_each_rank(act)
    assert [1, 1] == [each.stats()["ranks_lost"] for each in engine.engines]


def test_any_error_of_an_all_reduce_raises_nothing(storage: MemoryStorage) -> None:
    class Broken(SingleRank):
        size = 2

        def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
            raise OSError("no network")

    with (
        engine_on(storage, cache_pools(), ranks=Broken()) as engine,
        page_store(storage) as store,
        HandoffReceiver(engine, store, RARELY) as receiver,
    ):
        request = receiver.expect("0", prompt_of(0))
        assert request.poll()
        with request.result() as lease:
            assert lease.pages == 0


def waiting_on_closed(
    storage: HookedStorage | MemoryStorage, close: Callable[[CacheController], Any]
) -> tuple[HandoffRequest, HandoffReceiver, ExitStack]:
    stack = ExitStack()
    engine = stack.enter_context(engine_on(storage, cache_pools()))
    store = stack.enter_context(page_store(storage))
    receiver = stack.enter_context(HandoffReceiver(engine, store, RARELY))
    compute(engine, prompt_of(0)[:2])
    request = receiver.expect("0", prompt_of(0))
    close(engine)
    return request, receiver, stack


def test_a_controller_that_is_closed_ends_the_wait_with_what_l2_has(storage: MemoryStorage) -> None:
    """The poll raises nothing in the engine's loop, and the request stops waiting."""
    request, _, stack = waiting_on_closed(storage, lambda engine: engine.close())
    with stack:
        assert request.poll()
        with request.result() as lease:
            assert lease.pages == 2


def test_a_controller_that_is_closed_while_it_loads_ends_the_wait_too() -> None:
    storage, gate = HookedStorage(), Gate()

    def close(engine: CacheController) -> None:
        until(lambda: storage.calls["batch_exists"] == 2)  # the prefetch's, and for completions
        assert not engine.close(timeout_s=0.1)

    storage.hooks["batch_exists"] = gate
    request, _, stack = waiting_on_closed(storage, close)
    with stack:
        assert request.poll()
        threading.Timer(0.1, gate.open).start()
        with request.result() as lease:
            assert lease.pages == 2


def test_a_request_that_was_ended_is_in_no_all_reduce(storage: MemoryStorage) -> None:
    request, _, stack = waiting_on_closed(storage, lambda _: None)
    with stack:
        request.cancel()
        assert request.poll()
        with pytest.raises(RuntimeError, match="hand-off of request '0' has already ended"):
            request.result()
