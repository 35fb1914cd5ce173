"""The explain log below SGLang's own cache controller: lookups, loads, and incomplete stores."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from sglang_engine import MORE, TOKENS, WINDOW, Engine, PoolPlan, engine_world

from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.reading import LogReader, Selection


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    with engine_world():
        yield


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "explain.jsonl"


@pytest.fixture
def logged(file_config: dict[str, Any], log: Path) -> dict[str, Any]:
    return {**file_config, "adapter": {"explain_log": str(log)}}


def records_of(log: Path, **selection: Any) -> list[RequestRecord]:
    return list(LogReader(log).records(Selection(**selection)))


@pytest.mark.parametrize("v1", [0, 1])
def test_a_lookup_and_its_load_have_records(logged: dict[str, Any], log: Path, v1: int) -> None:
    with Engine([PoolPlan()], {**logged, "interface_v1": v1}) as engine:
        hashes = engine.write(TOKENS).hashes
        engine.read(MORE)

    lookup, load = records_of(log, request=hashes[0])
    assert (lookup.engine, lookup.rank, lookup.request) == ("sglang", 0, None)
    assert (lookup.operation, lookup.asked_pages, lookup.hit_pages) == (Operation.LOOKUP, 9, 8)
    assert (lookup.page, lookup.pool, lookup.reason) == (8, "kv", Reason.ABSENT)
    assert (load.operation, load.asked_pages, load.hit_pages) == (Operation.LOAD, 8, 8)
    assert load.reason is None


def test_the_pool_that_cuts_a_prefix_is_named(logged: dict[str, Any], log: Path) -> None:
    with (
        Engine([PoolPlan()], logged) as plain,
        Engine([PoolPlan(), WINDOW], logged) as windowed,
    ):
        plain.write(TOKENS)
        assert windowed.read(TOKENS).hits == 0

    (record,) = records_of(log)
    assert (record.hit_pages, record.pool, record.reason) == (0, "swa", Reason.ABSENT)


def test_a_damaged_page_is_told_by_its_check(logged: dict[str, Any], log: Path) -> None:
    with Engine([PoolPlan()], logged) as engine:
        engine.fill(1)
        fourth = engine.write(TOKENS).hashes[3]
        page = next(path for path in log.parent.rglob(f"*{fourth}*") if path.is_file())
        data = bytearray(page.read_bytes())
        data[-100] ^= 1
        page.write_bytes(data)
        assert engine.read(TOKENS).pages == 3

    (record,) = records_of(log, page_hash=fourth)
    assert (record.operation, record.page, record.reason) == (Operation.LOAD, 3, Reason.CORRUPT)
    assert record.hit_pages == 7


def test_pages_that_are_not_admitted_are_told(logged: dict[str, Any], log: Path) -> None:
    adapter = {**logged["adapter"], "admission": {"second_use": True}}
    with Engine([PoolPlan()], {**logged, "adapter": adapter}) as engine:
        engine.write(TOKENS)

    (record,) = records_of(log)
    assert (record.operation, record.reason) == (Operation.STORE, Reason.NOT_ADMITTED)
    assert record.reasons == {Reason.NOT_ADMITTED: 8}


def test_the_rank_is_that_of_the_server(logged: dict[str, Any], log: Path) -> None:
    with (
        engine_world(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2),
        Engine([PoolPlan()], logged) as engine,
    ):
        engine.read(TOKENS)

    (record,) = records_of(log)
    assert record.rank == 3


def test_an_open_breaker_is_told(logged: dict[str, Any], log: Path) -> None:
    with Engine([PoolPlan()], logged) as engine:
        engine.write(TOKENS)
        for _ in range(3):
            engine.storage._store.breaker.record(succeeded=False)
        assert engine.read(TOKENS).hits == 0

    (record,) = records_of(log)
    assert (record.hit_pages, record.reason) == (0, Reason.BREAKER_OPEN)
