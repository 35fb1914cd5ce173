from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import PROMPT, cache_pools, compute
from prometheus_client import CollectorRegistry
from stores import HookedStorage, failing

from hicache_storage.controller import CacheController
from hicache_storage.controller.handoff import HandoffReceiver, HandoffSender
from hicache_storage.errors import StorageUnavailable
from hicache_storage.metrics import CacheCollector
from hicache_storage.page_store import PageStore

if TYPE_CHECKING:
    from hicache_storage.storage import StorageStats


def test_a_scrape_shows_what_happened() -> None:
    registry = CollectorRegistry()
    storage = HookedStorage()
    with PageStore(storage) as store, CacheController(store, cache_pools()) as controller:
        registry.register(CacheCollector(store, controller, labels={"rank": "3"}))
        compute(controller, PROMPT)
        assert controller.drain(20)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"rank": "3", **labels})

        assert value("hicache_pages_total", direction="save", verdict="ok") == 32
        assert value("hicache_pages_total", direction="load", verdict="corrupt") == 0
        assert value("hicache_payload_bytes_total", direction="save") == 16 * sum(
            pool.space.page_nbytes for pool in controller.cache.pools
        )
        assert value("hicache_breaker_state", state="closed") == 1
        assert value("hicache_controller_events_total", event="written_pages") == 16


def test_a_scrape_shows_how_hand_offs_ended() -> None:
    registry = CollectorRegistry()
    with (
        PageStore(HookedStorage()) as store,
        CacheController(store, cache_pools()) as controller,
        HandoffSender(controller, store) as sender,
        HandoffReceiver(controller, store) as receiver,
    ):
        registry.register(CacheCollector(store, controller, handoffs=[sender, receiver]))
        compute(controller, PROMPT)
        assert sender.publish("request-1", PROMPT).result(20) == len(PROMPT)
        receiver.expect("request-2", PROMPT).cancel()

        for event in ("published", "cancelled_requests"):
            assert registry.get_sample_value("hicache_handoff_events_total", {"event": event}) == 1


def test_a_closed_storage_does_not_break_the_scrape() -> None:
    registry = CollectorRegistry()
    storage = HookedStorage()
    with PageStore(storage) as store:
        registry.register(CacheCollector(store))
        storage.close()

        assert registry.get_sample_value("hicache_breaker_opened_total") == 0


def test_a_storage_that_fails_does_not_break_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    storage = HookedStorage()
    storage.hooks["batch_exists"] = failing(StorageUnavailable("gone"))

    def gone() -> StorageStats:
        raise StorageUnavailable("gone")

    monkeypatch.setattr(storage, "stats", gone)
    with PageStore(storage) as store, CacheController(store, cache_pools()) as controller:
        registry.register(CacheCollector(store))
        controller.prefetch("request", PROMPT).result().release()

        assert registry.get_sample_value("hicache_match_failed_total") == 1


@pytest.mark.parametrize("name", ["hicache_storage_pages", "hicache_storage_bytes"])
def test_what_a_storage_does_not_know_is_left_out(name: str) -> None:
    registry = CollectorRegistry()
    with PageStore(HookedStorage()) as store:
        registry.register(CacheCollector(store))

        assert registry.get_sample_value(name) is None
