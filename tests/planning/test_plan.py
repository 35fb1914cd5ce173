"""The figures of a plan: shares, bandwidth, money, samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.planning.plan import make_plan
from hicache_storage.planning.settings import PlanSettings, Prices
from hicache_storage.replay.models import KVShape, PoolShape
from hicache_storage.replay.trace import BLOCK_TOKENS, Request, synthetic_trace
from hicache_storage.scalars import format_nbytes

_KV = PoolShape("kv", KVShape("mha", 2, 1, 2))
_DRAFT = PoolShape("draft", KVShape("mha", 1, 1, 1))
_BLOCK_NBYTES = 512 * (2 * 2 * 2 * 2 + 2 * 2)
_STORED_NBYTES = _BLOCK_NBYTES + 2 * 128
_SETTINGS = PlanSettings(
    model="m",
    pools=(_KV, _DRAFT),
    page_tokens=512,
    host_sizes=(200 * _BLOCK_NBYTES,),
    storage_sizes=(0, 800 * _STORED_NBYTES),
)


def _requests(*arrivals: tuple[float, tuple[int, ...]]) -> list[Request]:
    return [
        Request(arrival_s, len(blocks) * BLOCK_TOKENS, 1, blocks) for arrival_s, blocks in arrivals
    ]


def _plan(**changes: Any) -> dict[str, Any]:
    return make_plan(synthetic_trace(1, conversations=80), replace(_SETTINGS, **changes))


def test_tiers_add_up() -> None:
    for option in _plan()["options"]:
        assert option["hit_rate"] == option["l2_hit_rate"] + option["l3_hit_rate"]


def test_without_l3_nothing_moves() -> None:
    option = _plan()["options"][0]

    assert 0 == option["l3_hit_rate"] == option["l3_read"]["nbytes"] == option["l3_write"]["nbytes"]
    assert 0 == option["written_pages"] == option["unread_pages"]


def test_the_curves_agree_with_the_options() -> None:
    plan = _plan(storage_sizes=(1 << 40,))
    (curve,) = plan["l3_curves"]

    assert plan["options"][0]["hit_rate"] == pytest.approx(plan["ideal_hit_rate"])
    assert plan["ideal_hit_rate"] == curve["points"][-1][1] == plan["l2_curve"][-1][1]
    rates = [rate for _, rate in plan["l2_curve"]]
    assert sorted(rates) == rates


def test_pages_of_a_block_stay_together() -> None:
    small = _plan(page_tokens=64, storage_sizes=(0,))["options"][0]

    assert _plan()["options"][0]["hit_rate"] == small["hit_rate"]


def test_the_target_alone_hits_more_of_the_same_bytes() -> None:
    option = _plan()["options"][1]

    assert option["target_alone"]["hit_rate"] > option["hit_rate"]
    assert "target_alone" not in _plan(pools=(_KV,))["options"][1]


def test_bytes_are_told_for_each_pool() -> None:
    plan = _plan()
    read = plan["options"][1]["l3_read"]

    assert ["kv", "draft"] == list(read["pools"]) == [pool["name"] for pool in plan["pools"]]
    assert read["nbytes"] == pytest.approx(sum(read["pools"].values()))
    assert plan["distinct_nbytes"] == sum(pool["distinct_nbytes"] for pool in plan["pools"])


def test_bandwidth_is_that_of_the_windows() -> None:
    requests = _requests((0, (1, 2)), (0.5, (3,)), (100, (4,)))
    settings = replace(_SETTINGS, host_sizes=(5 * _BLOCK_NBYTES,))

    write = make_plan(requests, settings)["options"][1]["l3_write"]

    assert 4 * _STORED_NBYTES == write["nbytes"]
    assert 4 * _STORED_NBYTES / 100 == write["mean_bytes_per_s"]
    assert 3 * _STORED_NBYTES == write["max_1s_bytes_per_s"]
    assert 3 * _STORED_NBYTES / 60 == write["p99_60s_bytes_per_s"]
    assert _STORED_NBYTES == write["p99_1s_bytes_per_s"]  # of 101 windows the second largest


def test_requests_at_one_time_have_a_bandwidth_of_one_second() -> None:
    plan = make_plan(_requests((5, (1,)), (5, (2,))), _SETTINGS)

    assert 2 * _STORED_NBYTES == plan["options"][1]["l3_write"]["mean_bytes_per_s"]


def test_money_is_gpu_time_less_memory() -> None:
    prices = Prices(
        prefill_tokens_per_s=1000.0,
        gpu_hour=2.0,
        host_gib_month=3.0,
        storage_gib_month=1.0,
        busy_hours_per_month=100.0,
    )
    requests = _requests((0, (1,)), (512, (1,)))

    plan = make_plan(
        requests, replace(_SETTINGS, prices=prices, host_sizes=(1 << 30,), storage_sizes=(1 << 31,))
    )

    (option,) = plan["options"]
    assert 512 == option["saved_tokens"]
    assert 0.512 == option["gpu_seconds"]
    assert 0.001 == option["gpus"]
    assert 0.2 == pytest.approx(option["value_per_month"])
    assert 5.0 == option["cost_per_month"]
    assert -4.8 == pytest.approx(option["net_per_month"])
    assert 0 == plan["best"]


def test_without_prices_nothing_is_best() -> None:
    plan = _plan()

    assert plan["best"] is None
    assert plan["options"][0]["gpu_seconds"] is None


def test_sizes_that_are_not_given_fit_the_trace() -> None:
    plan = _plan(host_sizes=(), storage_sizes=())
    sizes = [(option["host_nbytes"], option["storage_nbytes"]) for option in plan["options"]]

    assert sorted(sizes) == sizes
    assert all(not storage or storage > host for host, storage in sizes)
    assert plan["options"][-1]["hit_rate"] == plan["ideal_hit_rate"]
    assert not plan["notes"]


def test_the_l2_for_a_share_of_the_ideal_hits_it() -> None:
    plan = _plan()
    size = plan["l2_for_share_of_ideal"]["0.9"]

    option = _plan(host_sizes=(size,), storage_sizes=(0,))["options"][0]

    assert 0.9 <= option["hit_rate"] / plan["ideal_hit_rate"] < 0.93


def test_a_sample_is_as_good_as_it_says() -> None:
    requests = synthetic_trace(1, conversations=1000)  # 14,000 blocks
    exact = make_plan(requests, _SETTINGS)
    sampled = make_plan(requests, replace(_SETTINGS, max_pages=exact["blocks"]["total"] // 4))

    assert exact["sample"] is None
    assert 0.25 == pytest.approx(sampled["sample"]["rate"], rel=0.01)
    for one, other in zip(exact["options"], sampled["options"], strict=True):
        assert one["error"] is None
        assert 0 < other["error"] < 0.1
        assert one["hit_rate"] == pytest.approx(other["hit_rate"], abs=other["error"])
    assert any("were analyzed" in note for note in sampled["notes"])


def test_prompts_that_do_not_fit_into_l2_are_noted() -> None:
    (note,) = _plan(host_sizes=(10 * _BLOCK_NBYTES,))["notes"]

    assert "the smallest L2 holds 10" in note


def test_an_l2_without_space_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"which takes {format_nbytes(_BLOCK_NBYTES)}: give more"):
        replace(_SETTINGS, host_sizes=(100,))


def test_a_page_size_that_does_not_divide_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="--page-size must divide"):
        replace(_SETTINGS, page_tokens=48)


def test_memory_does_not_grow_with_the_duration() -> None:
    plan = make_plan(_requests((0.0, (1,)), (365 * 86_400.0, (1, 2))), _SETTINGS)

    series = plan["options"][0]["read_series"]
    assert 5000 < len(series) <= 10_001
    assert [0, 3180] == [start_s for start_s, _ in series[:2]]


def test_a_trace_of_other_units_than_milliseconds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lasts 41,667 days.*timestamps must be milliseconds"):
        make_plan(_requests((0.0, (1,)), (3.6e9, (1,))), _SETTINGS)
