"""The simulated fleet: small traces with known answers, counts that add up, the same as a plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from _fleet_model import (
    BUCKETS,
    FleetFigures,
    FleetSettings,
    Lru,
    Router,
    max_over_mean,
    page_buckets,
    simulate,
)
from fleet_simulation import main, placement
from hicache_backends.redis.layout import BUCKETS as BUCKET_NAMES
from hicache_backends.redis.layout import SpaceKeys
from redis.crc import key_slot

from hicache_storage.keys import KeySpace, Shard
from hicache_storage.planning.plan import make_plan
from hicache_storage.planning.settings import PlanSettings
from hicache_storage.replay.models import parse_pool
from hicache_storage.replay.trace import BLOCK_TOKENS, Request, synthetic_trace

_TWO = FleetSettings(engines=2, host_blocks=100, storage_blocks=100)
_SPACE = KeySpace(
    model="m",
    dtype="bfloat16",
    layout="page_first",
    page_tokens=64,
    page_nbytes=1024,
    shard=Shard(layers=(0, 1)),
)


def _requests(*prompts: tuple[float, Sequence[int]]) -> list[Request]:
    return [
        Request(arrival_s, BLOCK_TOKENS * len(blocks), 1, tuple(blocks))
        for arrival_s, blocks in prompts
    ]


def _run(settings: FleetSettings, *prompts: tuple[float, Sequence[int]]) -> FleetFigures:
    return simulate(_requests(*prompts), settings, 1.0)


def test_an_engine_finds_in_l3_what_another_one_has_written() -> None:
    figures = _run(_TWO, (0, [1, 2]), (1, [1, 2, 3]))

    assert (0, 2, 3) == (figures.host_hits, figures.storage_hits, figures.computed)
    assert (3, 0) == (figures.written, figures.duplicates)


def test_an_engine_finds_its_own_blocks_in_its_own_memory() -> None:
    figures = _run(replace(_TWO, engines=1), (0, [1, 2]), (1, [1, 2, 3]))

    assert (2, 0, 3) == (figures.host_hits, figures.storage_hits, figures.computed)


def test_a_block_is_not_found_before_its_write_has_ended() -> None:
    figures = _run(replace(_TWO, write_s=2.0), (0, [1]), (1, [1]))

    assert (0, 2) == (figures.storage_hits, figures.computed)


def test_two_writes_of_a_block_at_once_are_one_duplicate() -> None:
    figures = _run(replace(_TWO, write_s=2.0), (0, [1]), (1, [1]))

    assert (2, 1, 1) == (figures.written, figures.duplicates, figures.by_several)


def test_a_look_before_the_write_finds_a_block_that_was_computed_twice() -> None:
    figures = _run(replace(_TWO, compute_s=2.0), (0, [1]), (1, [1]))

    assert (1, 1, 0) == (figures.written, figures.found, figures.duplicates)


def test_without_a_look_a_block_that_was_computed_twice_is_written_twice() -> None:
    figures = _run(replace(_TWO, compute_s=2.0, look_first=False), (0, [1]), (1, [1]))

    assert (2, 0, 1) == (figures.written, figures.found, figures.duplicates)


def test_a_block_that_l3_has_evicted_is_written_again() -> None:
    settings = replace(_TWO, engines=1, host_blocks=1, storage_blocks=1)

    figures = _run(settings, (0, [1]), (1, [2]), (2, [1]))

    assert (3, 1, 0) == (figures.written, figures.again, figures.duplicates)


def test_hits_end_at_the_first_gap() -> None:
    settings = replace(_TWO, engines=1, host_blocks=2, storage_blocks=0)

    figures = _run(settings, (0, [1, 2, 3]), (1, [1, 2, 3]))

    assert (2, 4) == (figures.host_hits, figures.computed)


def test_second_use_writes_a_block_when_one_engine_offers_it_again() -> None:
    settings = replace(_TWO, engines=1, host_blocks=1, second_use=True)

    figures = _run(settings, (0, [1]), (1, [2]), (2, [1]), (3, [2]), (4, [1]))

    assert (2, 2, 1) == (figures.refused, figures.written, figures.storage_hits)


def test_prompts_with_one_beginning_go_to_one_engine() -> None:
    settings = replace(_TWO, engines=7, router=Router.PREFIX)

    figures = _run(settings, (0, [1, 2]), (1, [1, 3]), (2, [1, 4]))

    assert figures.host_hits == 2


def test_the_least_loaded_engine_serves_a_request() -> None:
    settings = replace(_TWO, compute_s=1.0, router=Router.LEAST_LOADED)

    figures = _run(settings, (0, [1, 2, 3]), (0, [4]), (2, [5]))

    assert figures.waited_s == 0


def test_a_request_waits_for_its_engine() -> None:
    figures = _run(replace(_TWO, engines=1, compute_s=1.0), (0, [1, 2, 3]), (1, [4]))

    assert figures.waited_s == 2


def test_an_lru_list_evicts_the_block_that_was_used_first() -> None:
    lru = Lru(2)

    lru.use([1, 2, 1, 3])

    assert [True, False, True] == [block in lru for block in (1, 2, 3)]


@pytest.mark.parametrize("router", Router)
@pytest.mark.parametrize("second_use", [False, True])
def test_no_block_is_lost_or_counted_twice(router: Router, *, second_use: bool) -> None:
    requests = synthetic_trace(1, conversations=60)
    settings = FleetSettings(
        engines=8,
        router=router,
        host_blocks=100,
        storage_blocks=300,
        compute_s=0.5,
        write_s=0.5,
        second_use=second_use,
        pages_per_block=4,
    )

    figures = simulate(requests, settings, 4.0)

    assert figures.blocks == sum(len(request.blocks) for request in requests)
    assert figures.blocks == figures.host_hits + figures.storage_hits + figures.computed
    assert figures.offered == figures.refused + figures.found + figures.written
    assert figures.reads.total() == 4 * figures.storage_hits
    assert figures.writes.total() == 4 * figures.written


@pytest.mark.parametrize(("host_blocks", "storage_blocks"), [(300, 500), (400, 1000), (600, 1500)])
def test_one_engine_hits_what_the_plan_says(host_blocks: int, storage_blocks: int) -> None:
    requests = synthetic_trace(1, conversations=150)
    pools = (parse_pool("kv:mha,layers=1,heads=1,dim=1"),)
    plan = PlanSettings(model="m", pools=pools, page_tokens=BLOCK_TOKENS)
    plan = replace(
        plan,
        host_sizes=(host_blocks * plan.page_nbytes(pools),),
        storage_sizes=(storage_blocks * plan.stored_nbytes(pools),),
    )

    (option,) = make_plan(requests, plan)["options"]
    figures = simulate(
        requests,
        FleetSettings(engines=1, host_blocks=host_blocks, storage_blocks=storage_blocks),
        1.0,
    )

    assert figures.host_hits / figures.blocks == pytest.approx(option["l2_hit_rate"], abs=0.005)
    assert figures.storage_hits / figures.blocks == pytest.approx(option["l3_hit_rate"], abs=0.005)
    assert figures.offered == pytest.approx(option["written_pages"], rel=0.02)


def test_a_block_has_as_many_buckets_as_pages() -> None:
    assert len(page_buckets(2**64 - 1, 8)) == 8


def test_there_are_as_many_buckets_as_redis_has() -> None:
    assert len(BUCKET_NAMES) == BUCKETS


def test_a_page_is_placed_by_the_slot_of_its_key() -> None:
    page_hash = "7f" * 32
    slot = key_slot(SpaceKeys("hicache:", _SPACE.id).page(page_hash))

    ((_, servers),) = placement([(_SPACE, 1.0)], 16)

    assert servers[0x7F] == slot // 1024


def test_the_load_of_the_busiest_server_is_compared_with_the_mean() -> None:
    first_half = [bucket // 128 for bucket in range(BUCKETS)]

    assert max_over_mean(Counter({0: 3, 200: 1}), [(10.0, first_half)]) == 1.5


def test_the_program_prints_its_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_file = tmp_path / "fleet.json"
    flags = ["--conversations", "20", "--engines", "4", "--host-size", "1GiB"]

    main([*flags, "--json", str(json_file)])

    printed = capsys.readouterr().out
    figures = json.loads(json_file.read_text())["round robin"]
    assert sum(figures["writes"]) == 8 * figures["written"]
    assert "| round robin, no L3 |" in printed
    assert "| second use |" in printed
    assert "| 2 pools of 8 ranks |" in printed
