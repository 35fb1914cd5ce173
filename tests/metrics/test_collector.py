from __future__ import annotations

import pytest
from engines import PROMPT, cache_pools, compute
from framed import TARGET, framed
from hicache_backends.striped import StripedSettings, StripedStorage
from hicache_backends.tiered import TieredSettings, TieredStorage
from pages import hash_of
from prometheus_client import CollectorRegistry, generate_latest
from stores import HookedStorage, failing

from hicache_storage.controller import CacheController
from hicache_storage.errors import StorageUnavailable
from hicache_storage.handoff import HandoffReceiver, HandoffSender
from hicache_storage.metrics import CacheCollector
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer
from hicache_storage.storage import HiCacheStorage, StorageStats


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


@pytest.mark.parametrize("auto_describe", [True, False])
def test_two_caches_of_a_process_are_in_one_exposition(auto_describe: bool) -> None:  # noqa: FBT001
    """Each metric is described once, with the samples of both caches, in both kinds of registries."""
    registry = CollectorRegistry(auto_describe=auto_describe)
    with PageStore(HookedStorage()) as first, PageStore(HookedStorage()) as second:
        collector = CacheCollector(first, labels={"rank": "0", "host": "a"})
        registry.register(collector)
        collector.add(second, labels={"host": "a", "rank": "1"})
        second.breaker.writes.record(succeeded=False)

        text = generate_latest(registry).decode()

    described = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert sorted(set(described)) == sorted(described)
    for rank in "01":
        assert f'hicache_breaker_opened_total{{host="a",rank="{rank}"}} 0.0' in text


@pytest.mark.parametrize("labels", [{}, {"rank": "0"}, {"rank": "1", "host": "a"}])
def test_caches_with_equal_labels_are_refused(labels: dict[str, str]) -> None:
    with PageStore(HookedStorage()) as store:
        collector = CacheCollector(store, labels={"rank": "0"})

        with pytest.raises(ValueError, match="label"):
            collector.add(store, labels=labels)


@pytest.mark.parametrize("auto_describe", [True, False])
def test_a_second_collector_in_a_registry_is_refused_at_once(auto_describe: bool) -> None:  # noqa: FBT001
    """No exposition describes a metric twice: scrapers refuse such an exposition as a whole."""
    registry = CollectorRegistry(auto_describe=auto_describe)
    with PageStore(HookedStorage()) as store:
        registry.register(CacheCollector(store, labels={"rank": "0"}))

        with pytest.raises(ValueError, match="hicache_pages"):
            registry.register(CacheCollector(store, labels={"rank": "1"}))


def test_a_scrape_shows_which_direction_is_turned_away() -> None:
    registry = CollectorRegistry()
    with PageStore(HookedStorage(), PageStoreSettings(breaker_failures=1)) as store:
        registry.register(CacheCollector(store))
        store.breaker.writes.record(succeeded=False)

        def is_open(direction: str) -> float | None:
            return registry.get_sample_value("hicache_breaker_open", {"direction": direction})

        assert (is_open("load"), is_open("save")) == (0, 1)
        assert registry.get_sample_value("hicache_breaker_state", {"state": "open"}) == 1


@pytest.mark.parametrize("name", ["hicache_storage_pages", "hicache_storage_bytes"])
def test_figures_that_a_storage_does_not_have_are_left_out(name: str) -> None:
    class WithoutFigures(HookedStorage):
        def stats(self) -> StorageStats:
            return StorageStats()

    registry = CollectorRegistry()
    with PageStore(WithoutFigures()) as store:
        registry.register(CacheCollector(store))

        assert registry.get_sample_value(name) is None


def nested(lower: HiCacheStorage) -> TieredStorage:
    """Return a tier of two stripes above `lower`."""
    members = [{"name": name, "backend": "memory"} for name in ("a", "b")]
    stripes = StripedSettings.parse("striped", {"stripes": members})
    nvme = StripedStorage({"a": HookedStorage(), "b": HookedStorage()}, stripes)
    config = {"tiers": members, "breaker_failures": 1, "breaker_cooldown_s": 60}
    return TieredStorage({"nvme": nvme, "bucket": lower}, TieredSettings.parse("tiered", config))


def test_the_events_of_a_composed_storage_carry_the_tier() -> None:
    registry = CollectorRegistry()
    with PageStore(nested(HookedStorage())) as store:
        registry.register(CacheCollector(store))
        store.open_space(TARGET)
        store.save([Transfer(TARGET, [hash_of(0)], [framed(1)])])
        store.load([Transfer(TARGET, [hash_of(0)], [framed(1)])])

        labels = {"tier": "nvme", "event": "hits"}
        assert registry.get_sample_value("hicache_storage_events_total", labels) == 1


def test_each_tier_shows_what_it_holds() -> None:
    registry = CollectorRegistry()
    with (
        PageStore(nested(HookedStorage())) as store,
        CacheController(store, cache_pools()) as controller,
    ):
        registry.register(CacheCollector(store))
        compute(controller, PROMPT)
        assert controller.drain(20)

        held = {
            tier: registry.get_sample_value("hicache_tier_bytes", {"tier": tier}) or 0.0
            for tier in ("nvme", "nvme/a", "nvme/b", "bucket")
        }
    assert held["nvme"] == held["nvme/a"] + held["nvme/b"] == held["bucket"] > 0


def test_a_tier_that_fails_is_open_and_the_others_are_closed() -> None:
    registry = CollectorRegistry()
    bucket = HookedStorage()
    bucket.hooks["batch_set"] = failing(StorageUnavailable("gone"))
    with (
        PageStore(nested(bucket)) as store,
        CacheController(store, cache_pools()) as controller,
    ):
        registry.register(CacheCollector(store))
        compute(controller, PROMPT)
        assert controller.drain(20)

        def is_closed(tier: str) -> float | None:
            labels = {"tier": tier, "state": "closed"}
            return registry.get_sample_value("hicache_tier_state", labels)

        assert (1, 1, 0) == (is_closed("nvme"), is_closed("nvme/a"), is_closed("bucket"))


def test_the_events_of_a_plain_storage_have_no_tier() -> None:
    class Counting(HookedStorage):
        def stats(self) -> StorageStats:
            return StorageStats(counters={"evicted": 3})

    registry = CollectorRegistry()
    with PageStore(Counting()) as store:
        registry.register(CacheCollector(store))

        labels = {"tier": "", "event": "evicted"}
        assert registry.get_sample_value("hicache_storage_events_total", labels) == 3
