"""Replays over real storages: hits, verification, time, stops and settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hicache_backends.memory import MemorySettings, MemoryStorage
from replays import hits, trace_of

from hicache_storage.controller import ControllerSettings, PrefetchPolicy, WritePolicy
from hicache_storage.errors import ConfigError
from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.replay.driver import Replay, ReplaySettings
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.trace import BLOCK_TOKENS, Request, synthetic_trace
from hicache_storage.storage import HiCacheStorage

_L2_TOKENS = 50 * BLOCK_TOKENS
"""A little more than the longest prompt of these tests."""
_MHA = KVShape("mha", 3, 2, 2)
_MLA = KVShape("mla", 3, 1, 5)


class _FlippingStorage(MemoryStorage):
    """A storage that returns the last byte of every page with one bit changed."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        found = super().batch_get(space, hashes, pages)
        for page in pages:
            page.segments[-1][-1] ^= 1
            page.digest = None  # it is of the bytes before
        return found


def _settings(shape: KVShape = _MHA, **changes: Any) -> ReplaySettings:
    """Return settings of a cache whose L2 holds a few prompts, and which loads all hits of L3."""
    pools = (PoolShape("kv", shape), PoolShape("draft", KVShape(shape.kind, 1, 1, shape.dim)))
    page_tokens = changes.pop("page_tokens", 64)
    page_nbytes = sum(pool.shape.page(page_tokens).nbytes for pool in pools)
    patient = ControllerSettings(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_threshold_tokens=0
    )
    small = ReplaySettings(
        model="m",
        pools=pools,
        page_tokens=page_tokens,
        host_nbytes=_L2_TOKENS // page_tokens * page_nbytes,
        controller=patient,
    )
    return replace(small, **changes)


def _replayed(
    requests: Sequence[Request], storage: HiCacheStorage | None = None, **changes: Any
) -> dict[str, Any]:
    with Replay(storage or MemoryStorage(), _settings(**changes)) as replay:
        assert replay.run(requests)
        return replay.figures()


def _trace() -> list[Request]:
    """Return prompts that fit into the small L2."""
    requests = trace_of(600, conversations=40)
    return [request for request in requests if len(request.blocks) <= 32][:150]


class TestHits:
    @pytest.mark.parametrize("page_tokens", [64, 512])
    def test_with_space_in_l3_they_are_the_ideal(self, page_tokens: int) -> None:
        report = _replayed(_trace(), page_tokens=page_tokens)

        assert hits(report, "blocks") == report["blocks"]["ideal_hits"]
        assert report["blocks"]["l3_hits"] > 0
        assert report["corrupt_pages"] == 0

    @pytest.mark.parametrize(
        ("shape", "layout"),
        [
            (_MHA, "layer_first"),
            (_MHA, "page_first"),
            (_MHA, "page_first_direct"),
            (_MHA, "page_head"),
            (_MLA, "layer_first"),
            (_MLA, "page_first"),
            (_MLA, "page_first_direct"),
        ],
    )
    def test_every_layout_returns_the_written_bytes(self, shape: KVShape, layout: str) -> None:
        report = _replayed(synthetic_trace(1, conversations=15), shape=shape, layout=layout)

        assert report["blocks"]["hit_rate"] == report["blocks"]["ideal_hit_rate"]
        assert report["corrupt_pages"] == 0

    def test_every_page_found_has_its_draft(self) -> None:
        report = _replayed(_trace())

        assert report["paired_pages"] == hits(report) > 0

    def test_every_byte_found_was_verified(self) -> None:
        report = _replayed(synthetic_trace(0, conversations=10))

        assert report["verified_nbytes"] == hits(report) * _settings().page_nbytes

    def test_another_run_finds_the_pages_of_the_first(self) -> None:
        requests, storage = synthetic_trace(0, conversations=20), MemoryStorage()
        _replayed(requests, storage)

        assert _replayed(requests, storage)["pages"]["hit_rate"] == 1.0

    def test_another_model_finds_nothing_of_the_first(self) -> None:
        requests, storage = synthetic_trace(0, conversations=5), MemoryStorage()
        _replayed(requests, storage)

        assert _replayed(requests, storage, model="other")["blocks"]["hit_rate"] < 1.0

    @pytest.mark.parametrize("write_policy", WritePolicy)
    @pytest.mark.parametrize("prefetch_policy", PrefetchPolicy)
    def test_no_policy_finds_more_than_the_ideal_or_other_bytes(
        self, write_policy: WritePolicy, prefetch_policy: PrefetchPolicy
    ) -> None:
        controller = ControllerSettings(prefetch_policy=prefetch_policy, write_policy=write_policy)

        report = _replayed(synthetic_trace(2, conversations=20), controller=controller)

        assert report["blocks"]["hit_rate"] <= report["blocks"]["ideal_hit_rate"]
        assert report["pages"]["l2_hits"] > 0
        assert report["corrupt_pages"] == 0

    def test_a_prompt_longer_than_l2_is_replayed(self) -> None:
        report = _replayed([Request(0.0, 51200, 1, tuple(range(100)))] * 2)

        assert hits(report) == 400
        assert report["corrupt_pages"] == 0
        assert report["unreserved_pages"] == 0

    def test_an_empty_prompt_is_replayed(self) -> None:
        assert _replayed([Request(0.0, 0, 1, ())])["requests"] == 1


class TestVerification:
    def test_wrong_bytes_of_a_store_are_counted(self) -> None:
        requests = synthetic_trace(0, conversations=20)

        report = _replayed(requests, _FlippingStorage(), checksum="none")

        l3_pages = report["pages"]["l3_hits"]
        assert report["corrupt_pages"] >= 2 * l3_pages > 0

    def test_checksums_turn_wrong_bytes_into_misses(self) -> None:
        report = _replayed(synthetic_trace(0, conversations=20), _FlippingStorage())

        assert report["corrupt_pages"] == 0
        assert report["pages"]["l3_hits"] == 0
        assert report["store"]["load_corrupt"] > 0

    def test_a_full_store_costs_hits_only(self) -> None:
        full = MemoryStorage(MemorySettings.parse("memory", {"capacity_nbytes": 100_000}))

        report = _replayed(synthetic_trace(0, conversations=20), full)

        assert report["corrupt_pages"] == 0
        assert report["store"]["save_refused"] > 0
        assert report["storage"]["refused_no_space"] > 0
        assert report["blocks"]["hit_rate"] < report["blocks"]["ideal_hit_rate"]


class TestTime:
    def test_figures_have_the_time_that_calls_took(self) -> None:
        report = _replayed(synthetic_trace(0, conversations=20))

        assert report["l3_read"]["nbytes"] == report["store"]["load_nbytes"] > 0
        assert 0 < report["l3_read"]["busy_s"] < 60
        assert report["l3_write"]["gb_per_s"] > 0
        assert 0 < report["prefetch"]["p50_s"] <= report["prefetch"]["p99_s"]

    def test_a_speed_keeps_the_gaps_of_the_trace(self) -> None:
        requests = [Request(second, 512, 1, (0,)) for second in (0.0, 1.0, 4.0)]
        began_s = time.monotonic()

        _replayed(requests, speed=10.0)

        assert time.monotonic() - began_s >= 0.4

    def test_time_begins_with_the_first_request(self) -> None:
        """The times of a trace may begin at any number."""
        began_s = time.monotonic()

        _replayed([Request(1e6, 512, 1, (0,)), Request(1e6 + 1, 512, 1, (0,))], speed=100.0)

        assert time.monotonic() - began_s < 60

    def test_a_replay_without_a_speed_does_not_wait(self) -> None:
        began_s = time.monotonic()

        _replayed([Request(0.0, 512, 1, (0,)), Request(1000.0, 512, 1, (0,))])

        assert time.monotonic() - began_s < 60

    def test_a_stop_takes_effect_after_the_current_request(self) -> None:
        stop = threading.Event()
        with Replay(MemoryStorage(), _settings()) as replay:
            complete = replay.run(
                synthetic_trace(0, conversations=20),
                stop=stop,
                progress=lambda counts: stop.set() if counts.requests == 5 else None,
            )

        assert not complete
        assert replay.counts.requests == 5

    def test_a_stop_ends_the_wait_for_the_next_request(self) -> None:
        stop = threading.Event()
        with Replay(MemoryStorage(), _settings(speed=1.0)) as replay:
            replay.run(
                [Request(0.0, 512, 1, (0,)), Request(3600.0, 512, 1, (0,))],
                stop=stop,
                progress=lambda _: stop.set(),
            )

        assert replay.counts.requests == 1

    def test_a_stop_ends_the_longest_possible_gap(self) -> None:
        stop = threading.Event()
        stopper = threading.Timer(0.2, stop.set)
        stopper.start()
        with Replay(MemoryStorage(), _settings(speed=1e-12)) as replay:
            replay.run([Request(0.0, 512, 1, (0,)), Request(1.0, 512, 1, (0,))], stop=stop)
        stopper.join()

        assert replay.counts.requests <= 1


class TestSettings:
    def test_pages_must_fill_blocks(self) -> None:
        with pytest.raises(
            ConfigError, match="must divide the trace's blocks of 512 tokens, but 48"
        ):
            _settings(page_tokens=48)

    def test_l2_must_hold_a_page(self) -> None:
        with pytest.raises(ConfigError, match="--host-size of 1000 B holds no page"):
            _settings(host_nbytes=1000)

    def test_l2_must_fit_into_the_machine(self) -> None:
        with pytest.raises(ConfigError, match="this machine has"):
            Replay(MemoryStorage(), _settings(host_nbytes=1 << 60))

    def test_a_layout_that_does_not_go_with_a_shape_is_refused_and_leaves_no_thread(self) -> None:
        before = set(threading.enumerate())

        with pytest.raises(ConfigError, match=r"pool 'kv' .*page_head"):
            Replay(MemoryStorage(), _settings(_MLA, layout="page_head"))

        assert not set(threading.enumerate()) - before

    def test_the_draft_is_another_key_space(self) -> None:
        with Replay(MemoryStorage(), _settings()) as replay:
            target, draft = (pool.space for pool in replay.pools)

        assert ("kv", "draft") == (target.pool, draft.pool)
        assert target.id != draft.id

    def test_an_mla_pool_is_the_same_on_every_rank(self) -> None:
        with Replay(MemoryStorage(), _settings(_MLA)) as replay:
            assert {pool.space.shard.heads for pool in replay.pools} == {None}

    def test_pools_share_l2_in_proportion(self) -> None:
        with Replay(MemoryStorage(), _settings()) as replay:
            assert [pool.host.slots for pool in replay.pools] == [400, 400]
