"""The explain log below LMCache's own storage manager: a record for each task and object group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_engine import Engine, GroupPlan, Plan

from hicache_storage.request_log import Operation, Reason, RequestRecord
from hicache_storage.request_log.reading import LogReader, Selection

TWO_GROUPS = Plan(groups=(GroupPlan(), GroupPlan(shapes=((1, 2, 16, 32),), window=2)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "explain.jsonl"


@pytest.fixture
def logged(file_params: dict[str, Any], log: Path) -> dict[str, Any]:
    return {**file_params, "explain_log": str(log)}


def records_of(log: Path) -> list[RequestRecord]:
    return list(LogReader(log).records(Selection()))


def hash_of(chunk: int) -> str:
    return chunk.to_bytes(32, "big").hex()


def test_a_lookup_and_its_load_have_records(logged: dict[str, Any], log: Path) -> None:
    with Engine(logged) as engine:
        engine.write(range(6))
        engine.wipe()
        engine.read(range(8))

    lookup, load = records_of(log)
    assert (lookup.engine, lookup.operation) == ("lmcache", Operation.LOOKUP)
    assert (lookup.asked_pages, lookup.hit_pages, lookup.page) == (8, 6, 6)
    assert (lookup.page_hash, lookup.reason) == (hash_of(6), Reason.ABSENT)
    assert (load.operation, load.asked_pages, load.hit_pages) == (Operation.LOAD, 6, 6)
    assert load.reason is None
    assert load.first_hash == lookup.first_hash == hash_of(0)


def test_each_object_group_has_a_record(logged: dict[str, Any], log: Path) -> None:
    with Engine(logged, TWO_GROUPS) as engine:
        engine.read(range(4))

    records = records_of(log)
    assert [record.operation for record in records] == [Operation.LOOKUP] * 2
    assert len({record.pool for record in records}) == 2


def test_a_damaged_object_is_told_by_its_check(logged: dict[str, Any], log: Path) -> None:
    with Engine(logged) as engine:
        engine.write(range(4))
        engine.wipe()
        page = next(path for path in log.parent.rglob(f"*{hash_of(2)}*") if path.is_file())
        data = bytearray(page.read_bytes())
        data[-100] ^= 1
        page.write_bytes(data)
        assert engine.read(range(4)).chunks == 2

    load = next(record for record in records_of(log) if record.operation is Operation.LOAD)
    assert (load.page, load.page_hash, load.reason) == (2, hash_of(2), Reason.CORRUPT)


def test_objects_that_are_not_admitted_are_told(logged: dict[str, Any], log: Path) -> None:
    with Engine({**logged, "admission": {"second_use": True}}) as engine:
        engine.write(range(4))

    (record,) = records_of(log)
    assert (record.operation, record.reason) == (Operation.STORE, Reason.NOT_ADMITTED)
    assert (record.asked_pages, record.hit_pages) == (4, 0)


def test_a_store_that_is_attached_again_goes_on_in_the_file(
    logged: dict[str, Any], log: Path
) -> None:
    with Engine(logged) as engine:
        engine.read(range(2))
        engine.adapter.reconfigure("detach", {})
        engine.adapter.reconfigure("attach", {})
        engine.read(range(3))

    assert [record.asked_pages for record in records_of(log)] == [2, 3]
