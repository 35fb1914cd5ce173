"""The prefill side: its waits, its writes, its completions, and its deadline."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from engines import (
    DRAFT_SHAPE,
    PROMPT,
    cache_pool,
    cache_pools,
    compute,
    engine_on,
    optional_draft,
    until,
)
from engines import page_store as new_page_store
from hicache_backends.memory import MemoryStorage
from pages import hash_of
from stores import Gate, HookedStorage, failing

from hicache_storage.controller import CacheController, CachePool, WritePolicy
from hicache_storage.errors import StorageUnavailable
from hicache_storage.handoff import HandoffReceiver, HandoffSender, HandoffSettings
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore
from hicache_storage.storage import HiCacheStorage

OTHER = [hash_of(1000 + number) for number in range(4)]


@contextmanager
def prefill(
    storage: HiCacheStorage, pools: list[CachePool], *, timeout_s: float = 20, **how: Any
) -> Generator[tuple[CacheController, PageStore]]:
    """Yield an engine, and the page store of its sender."""
    with engine_on(storage, pools, **how) as engine, new_page_store(storage, timeout_s) as store:
        for pool in pools:
            store.open_space(pool.space)
        yield engine, store


def stored(storage: MemoryStorage) -> dict[str, int]:
    """Return how many pages the storage has of each pool."""
    return {space.pool: len(list(storage.scan(space))) for space in storage.spaces()}


class _Holding(HookedStorage):
    """A storage that delays the writes of some pages."""

    def __init__(self, *held: str) -> None:
        super().__init__()
        self.gates = {page_hash: Gate() for page_hash in held}

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for page_hash, gate in self.gates.items():
            if page_hash in hashes:
                answers: list[bool] = gate(
                    lambda: super(_Holding, self).batch_set(space, hashes, pages)
                )
                return answers
        return super().batch_set(space, hashes, pages)


class _RefusesTargets(MemoryStorage):
    """A storage that refuses all pages of the target, or some of them."""

    takes: Sequence[str] = ()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if space.pool != "kv":
            return super().batch_set(space, hashes, pages)
        return [
            page_hash in self.takes
            and super(_RefusesTargets, self).batch_set(space, [page_hash], [page])[0]
            for page_hash, page in zip(hashes, pages, strict=True)
        ]


def test_a_request_is_published_while_others_wait_to_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pages of the request are written, but the pages of another request are delayed."""
    monkeypatch.setattr("hicache_storage.handoff.sender._RETRY_S", 600)
    storage = _Holding(PROMPT[0], OTHER[0])
    own, others = storage.gates.values()
    with (
        prefill(storage, cache_pools()) as (engine, store),
        HandoffSender(engine, store) as sender,
    ):
        compute(engine, PROMPT[:4])
        compute(engine, OTHER)
        assert own.entered.wait(20)
        published = sender.publish("r", PROMPT[:4])
        until(lambda: not sender._executor._tasks)  # it is looking at its pages
        own.open()
        assert others.entered.wait(20)

        assert published.result(20) == 4

        others.open()


def test_publishing_waits_for_queued_pages() -> None:
    storage = _Holding(OTHER[0])
    (gate,) = storage.gates.values()
    with (
        prefill(storage, cache_pools()) as (engine, store),
        HandoffSender(engine, store) as sender,
    ):
        compute(engine, OTHER)
        assert gate.entered.wait(20)
        published = sender.publish("r", OTHER)
        assert not engine.cache.wait_written(OTHER, 0.1)
        assert not published.done()

        gate.open()

        assert published.result(20) == 4
        assert storage.calls["batch_set"] == 3  # each pool once, and the completions


@pytest.mark.parametrize(("takes", "written"), [([], 0), (PROMPT[1:3], 2)], ids=["none", "some"])
def test_no_draft_is_in_storage_without_its_target(takes: list[str], written: int) -> None:
    storage = _RefusesTargets()
    storage.takes = takes
    with (
        prefill(storage, optional_draft(), write_policy=WritePolicy.WRITE_BACK) as (engine, store),
        HandoffSender(engine, store, HandoffSettings(timeout_s=5)) as sender,
    ):
        compute(engine, PROMPT[:4])

        assert sender.publish("r", PROMPT[:4]).result(20) == 0

        assert Counter(stored(storage)) == Counter(kv=written, draft=written, handoff=2)
        assert sender.stats().get("written_pages", 0) == 2 * written


def test_a_failed_lookup_is_repeated() -> None:
    """Pages whose lookup fails for a moment do not count as absent, and are not written again."""
    storage = HookedStorage()
    with (
        prefill(storage, cache_pools()) as (engine, store),
        HandoffSender(engine, store) as sender,
    ):
        compute(engine, PROMPT)
        assert engine.drain(20)
        lookups = iter(range(1000))

        def flap(answer: Any) -> Any:
            if next(lookups) % 2 == 0:
                raise StorageUnavailable("a moment, please")
            return answer()

        storage.hooks["batch_exists"] = flap

        assert sender.publish("r", PROMPT).result(20) == len(PROMPT)
        assert "written_pages" not in sender.stats()


def test_a_shard_that_storage_cannot_look_up_gets_no_completion() -> None:
    storage = HookedStorage()
    with (
        prefill(storage, cache_pools()) as (engine, store),
        HandoffSender(engine, store, HandoffSettings(timeout_s=0.2)) as sender,
    ):
        compute(engine, PROMPT)
        assert engine.drain(20)
        storage.hooks["batch_exists"] = failing(StorageUnavailable("no answer"))
        sets = storage.calls["batch_set"]

        assert sender.publish("r", PROMPT).result(60) == 0

        assert sender.stats() == {"unpublished": 1}
        assert storage.calls["batch_set"] == sets


def test_publishing_has_one_deadline_for_all_lookups() -> None:
    """If the storage does not answer, the sender waits for one timeout, however many pools there are."""
    storage, gate = HookedStorage(), Gate()
    pools = [cache_pool(f"pool-{number}", DRAFT_SHAPE) for number in range(8)]
    with (
        prefill(storage, pools, timeout_s=1) as (engine, store),
        HandoffSender(engine, store, HandoffSettings(timeout_s=0.5)) as sender,
    ):
        compute(engine, PROMPT)
        assert engine.drain(20)
        storage.hooks["batch_exists"] = gate
        began_s = time.monotonic()
        assert sender.publish("r", PROMPT).result(60) == 0
        took_s = time.monotonic() - began_s
        gate.open()
    assert took_s < 8  # 16 s, were each of the 16 questions given its second


@pytest.mark.parametrize("request_id", ["", json.loads('"\\ud800"'), "\U0001f600" * 10_000, "\0"])
def test_any_string_is_a_request_id(request_id: str) -> None:
    storage = MemoryStorage()
    with (
        prefill(storage, cache_pools()) as (engine, store),
        HandoffSender(engine, store) as sender,
        HandoffReceiver(engine, store) as receiver,
    ):
        compute(engine, PROMPT)
        assert sender.publish(request_id, PROMPT).result(20) == len(PROMPT)
        with receiver.expect(request_id, PROMPT, timeout_s=60).result() as lease:
            assert lease.pages == len(PROMPT)
        assert receiver.stats()["complete_requests"] == 1


def test_a_page_that_is_in_no_queue_is_not_waited_for() -> None:
    with engine_on(None, cache_pools()) as engine:
        compute(engine, PROMPT[:4])

        assert engine.cache.wait_written([*PROMPT, hash_of(77)], 600)


def test_a_wait_ends_with_the_last_page() -> None:
    storage = _Holding(OTHER[0])
    (gate,) = storage.gates.values()
    with engine_on(storage, cache_pools()) as engine:
        compute(engine, OTHER)
        assert gate.entered.wait(20)
        written: list[bool] = []
        waiting = threading.Thread(
            target=lambda: written.append(engine.cache.wait_written(OTHER, 60))
        )
        waiting.start()
        gate.open()
        waiting.join(30)
        assert written == [True]
