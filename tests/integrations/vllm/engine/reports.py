"""Events, metrics, and the new key space that a reset of vLLM's caches begins."""

from __future__ import annotations

import importlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import CONNECTOR, FULL, MODULE, PROMPT, Engine, config

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.vllm import _metrics

kv_events: Any = importlib.import_module("vllm.distributed.kv_events")
TIER = ("1:HiCacheTier", "file")
"""The labels `tier` and `backend` of the only tier."""
prometheus: Any = importlib.import_module("prometheus_client")


def events_of(engine: Engine) -> list[Any]:
    return list(engine.connector.take_events())


def stored(events: list[Any]) -> list[Any]:
    return [
        event
        for event in events
        if isinstance(event, kv_events.BlockStored) and event.medium == "STORAGE"
    ]


# --- events
# -------------------------------------------------------------------------------------------


def test_stored_pages_are_events_with_the_locality(file_config: dict[str, Any]) -> None:
    told = {**file_config, "enable_kv_events": True, "locality": "REMOTE"}
    with Engine(told, events=True) as engine:
        kept: list[Any] = []
        take = engine.tier.take_events

        def keep() -> list[Any]:
            events = take()
            kept.extend(events)
            return list(events)

        engine.tier.take_events = keep
        engine.write(PROMPT)
        engine.step()

    assert 6 == sum(len(event.keys) for event in kept)
    assert {("STORAGE", False, "REMOTE")} == {
        (event.medium.value, event.removed, event.locality.value) for event in kept
    }


def published(engine: Engine) -> list[Any]:
    """Write the prompt, and return the events that vLLM publishes."""
    found: list[Any] = []
    take = engine.connector.take_events

    def publish() -> list[Any]:
        events = list(take())
        found.extend(events)
        return events

    engine.connector.take_events = publish
    engine.write(PROMPT)
    found.extend(take())
    return found


def test_vllm_publishes_them_as_stored_blocks_of_a_storage(file_config: dict[str, Any]) -> None:
    told = {**file_config, "enable_kv_events": True, "locality": "REMOTE"}
    with Engine(told, events=True) as engine:
        blocks = stored(published(engine))

    assert 6 == sum(len(event.block_hashes) for event in blocks)
    assert {"REMOTE"} == {event.locality for event in blocks}


def test_a_page_that_turns_out_to_be_gone_is_an_event(file_config: dict[str, Any]) -> None:
    with Engine({**file_config, "enable_kv_events": True}, events=True) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        asked = engine.start(PROMPT)
        store = engine.tier._connection.store
        (space,) = engine.tier._groups.spaces.values()
        load = store.begin_load

        def delete_first(transfers: Any, **fields: Any) -> Any:
            store.delete(space, transfers[0].hashes)
            return load(transfers, **fields)

        removed: list[Any] = []
        take = engine.tier.take_events

        def keep_removed() -> list[Any]:
            events = take()
            removed.extend(event for event in events if event.removed)
            return list(events)

        engine.tier.take_events = keep_removed
        store.begin_load = delete_first
        engine.step_until(asked.is_finished)
        assert engine.settle()

    assert 6 == sum(len(event.keys) for event in removed)


def test_events_of_blocks_that_no_lookup_finds_are_refused(file_config: dict[str, Any]) -> None:
    """vLLM would announce each block of a chunk, but half of a chunk is never a hit."""
    told = {**file_config, "enable_kv_events": True, "self_describing_kv_events": True}
    with pytest.raises(ConfigError, match="self_describing_kv_events: announces each block"):
        Engine({**told, "blocks_per_chunk": 4}, events=True)
    with Engine({**told, "blocks_per_chunk": 1}, events=True) as engine:
        assert FULL == sum(len(event.token_ids) for event in stored(published(engine)))


def test_without_events_of_vllm_there_are_none(file_config: dict[str, Any]) -> None:
    with Engine({**file_config, "enable_kv_events": True}) as engine:
        engine.write(PROMPT)
        assert [] == engine.tier.take_events()


# --- metrics
# ------------------------------------------------------------------------------------------


def totals(engine: Engine, name: str) -> Counter[tuple[str, ...]]:
    found: Counter[tuple[str, ...]] = Counter()
    for stats in engine.stats:
        found.update(stats["data"].get(name, {}))
    return found


def last(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    return {
        labels: value
        for stats in engine.stats
        for labels, value in stats["data"].get(name, {}).items()
    }


def test_verdicts_bytes_latency_usage_and_breakers_are_metrics(file_config: dict[str, Any]) -> None:
    capacity = {**file_config["config"], "capacity_nbytes": 1 << 24}
    with Engine({**file_config, "config": capacity}) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        engine.write(PROMPT)
        row = engine.tier._rows.nbytes

        assert {(*TIER, "store", "ok"): 6, (*TIER, "load", "ok"): 6} == totals(
            engine, _metrics.PAGES
        )
        assert {(*TIER, "store"): 6 * row, (*TIER, "load"): 6 * row} == totals(
            engine, _metrics.BYTES
        )
        assert 6 == totals(engine, _metrics.LOOKUP_PAGES)[*TIER, "present"]
        assert {(*TIER, "reads"): 0, (*TIER, "writes"): 0} == last(engine, _metrics.BREAKER)
        assert {TIER: 1 << 24} == last(engine, _metrics.STORE_CAPACITY)
        assert last(engine, _metrics.STORE_BYTES)[TIER] > 6 * row
        seconds = [
            stats["data"][_metrics.SECONDS]
            for stats in engine.stats
            if _metrics.SECONDS in stats["data"]
        ]
        operations = {labels for each in seconds for labels in each}
        assert {(*TIER, "lookup"), (*TIER, "load"), (*TIER, "store")} == operations


def test_vllms_exporter_takes_every_metric(file_config: dict[str, Any]) -> None:
    """The exporter runs in the API server's process, which has the config but no connector."""
    registry = prometheus.CollectorRegistry()
    kinds: dict[Any, Any] = {}
    for name in ("Counter", "Gauge", "Histogram"):
        kind = getattr(prometheus, name)
        kinds[kind] = partial(kind, registry=registry)
    with Engine(file_config) as engine:
        engine.write(PROMPT)
        engine.forget_host()
        engine.write(PROMPT)
        connector: Any = engine.connector.__class__
        assert CONNECTOR == connector.__name__
        extra = {"cpu_bytes_to_use": 1 << 20, **file_config}
        frontend = config.VllmConfig(
            device_config=config.DeviceConfig(device="cpu"),
            kv_transfer_config=config.KVTransferConfig(
                kv_connector=CONNECTOR,
                kv_connector_module_path=MODULE,
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        )
        exporter = connector.build_prom_metrics(frontend, kinds, ["engine"], {0: ["0"]})
        for stats in engine.stats:
            exporter.observe(stats)

    text = prometheus.generate_latest(registry).decode()
    pages = 'vllm:kv_offload_hicache_pages_total{backend="file",engine="0",operation="load",'
    assert f'{pages}tier="1:HiCacheTier",verdict="ok"}} 6.0' in text
    assert "vllm:kv_offload_hicache_seconds_bucket" in text
    assert "vllm:kv_offload_tiering_read_bytes" in text


def test_two_tiers_of_one_backend_have_series_of_their_own(tmp_path: Path) -> None:
    tiers = [
        {
            "type": "HiCacheTier",
            "backend": "file",
            "config": {"path": str(tmp_path / str(n)), "capacity_nbytes": n << 24},
            "lookup_timeout_s": 15,
        }
        for n in (1, 2)
    ]
    with Engine({"secondary_tiers": tiers}) as engine:
        engine.write(PROMPT)
        for tier in engine.manager.secondary_tiers:
            tier._metrics._taken_s = 0
        engine.write([5, *PROMPT])
        capacities = last(engine, _metrics.STORE_CAPACITY)

    assert {(f"{n}:HiCacheTier", "file"): n << 24 for n in (1, 2)} == capacities


def test_an_idle_tier_reports_seldom(file_config: dict[str, Any]) -> None:
    with Engine(file_config) as engine:
        engine.write(PROMPT)
        engine.tier.get_stats()
        assert [None] * 10 == [engine.tier.get_stats() for _ in range(10)]


# --- admission
# ----------------------------------------------------------------------------------------


def test_pages_are_written_at_their_second_use_and_then_only_are_events(
    file_config: dict[str, Any],
) -> None:
    fields = {**file_config, "admission": {"second_use": True}, "enable_kv_events": True}
    with Engine(fields, events=True) as engine:
        kept: list[Any] = []
        take = engine.tier.take_events

        def keep() -> list[Any]:
            events = take()
            kept.extend(events)
            return list(events)

        engine.tier.take_events = keep
        engine.write(PROMPT)
        assert [] == kept
        assert 6 == totals(engine, _metrics.PAGES)[*TIER, "store", "not_admitted"]
        failures = totals(engine, "vllm:kv_offload_tiering_cascade_job_failures")
        assert {} == +failures
        engine.forget_host()
        assert 0 == engine.write(PROMPT).computed
        assert 6 == sum(len(event.keys) for event in kept)
        engine.forget_host()
        assert FULL == engine.write(PROMPT).computed


# --- resets
# -------------------------------------------------------------------------------------------


def test_a_reset_begins_a_new_key_space(file_config: dict[str, Any]) -> None:
    """vLLM resets its caches for new weights, but its secondary tiers keep the old weights' KV."""
    with Engine(file_config) as engine:
        engine.write(PROMPT)
        assert engine.core.reset_prefix_cache(reset_connector=True)
        engine.workers.weights = "new"
        answer = engine.write(PROMPT)
        assert (answer.computed, answer.wrong) == (0, 0)
        engine.forget_host()
        answer = engine.write(PROMPT)
        assert (answer.computed, answer.wrong) == (FULL, 0)
    with Engine(file_config) as engine:
        answer = engine.write(PROMPT)
        assert (answer.computed, answer.wrong) == (FULL, 0)


def test_pages_of_two_resets_are_never_shared(file_config: dict[str, Any]) -> None:
    for weights in ("one", "two"):
        with Engine(file_config) as engine:
            assert engine.core.reset_prefix_cache(reset_connector=True)
            engine.workers.weights = weights
            answer = engine.write(PROMPT)
            assert (answer.computed, answer.wrong) == (0, 0)


def test_a_reset_while_jobs_are_under_way(file_config: dict[str, Any], tmp_path: Path) -> None:
    with Engine(file_config) as engine:
        engine.write(PROMPT)
        for steps in range(6):
            engine.forget_host()
            asked = engine.start(PROMPT)
            for _ in range(steps):
                engine.step()
            engine.connector.reset_cache()
            engine.step_until(asked.is_finished)
            assert engine.settle()
            assert engine.workers.seen.pop(asked.request_id)[2] == 0
        assert engine.tier._metrics.errors == 0
