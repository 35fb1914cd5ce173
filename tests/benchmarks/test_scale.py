"""A short run of the benchmark of stores of many pages: costs are measured, and work is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from _scale_costs import FilledStore
from _scale_fill import fill
from _scale_places import file_place
from scale import Amounts, Cost, cost_cell, measured, ratio_cell, table

_EVERYWHERE = ["fill", "exists, a hit", "exists, a miss", "get", "set", "scan", "clear"]
_PAGES = 1200
"""More than one page of a listing in `s3`."""


def _amounts(path: Path) -> Amounts:
    return Amounts(rounds=1, batches=1, batch=32, page_nbytes=64, processes=1, path=path)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("memory", []),
        ("file", ["bytes", "open", "count", "evict"]),
        ("hf3fs", ["bytes", "open", "count", "evict"]),
        ("redis", ["bytes", "open", "evict"]),
        ("s3", ["open"]),
    ],
)
def test_every_cost_of_a_store_is_measured(name: str, more: list[str], tmp_path: Path) -> None:
    costs = list(measured(name, _PAGES, _amounts(tmp_path)))

    assert {*_EVERYWHERE, *more} == {cost.operation for cost in costs}
    assert all(cost.wall_us > 0 for cost in costs)


def test_no_file_is_left(tmp_path: Path) -> None:
    for _ in measured("file", 100, _amounts(tmp_path)):
        pass

    assert [] == list(tmp_path.iterdir())


def test_several_processes_fill_a_store(tmp_path: Path) -> None:
    with file_place(tmp_path) as place:
        sample = fill(place, 1001, page_nbytes=64, processes=2)

        with place.open() as storage:
            assert 1001 == sum(1 for _ in storage.scan(next(storage.spaces())))
    assert 1001 == sample.count


def test_a_page_that_was_lost_ends_the_run(tmp_path: Path) -> None:
    with file_place(tmp_path) as place:
        store = FilledStore(place, 100, page_nbytes=64, batch=100, processes=1)
        store.storage.clear(next(store.storage.spaces()))

        with pytest.raises(RuntimeError, match="a page was lost"):
            store.get()
        store.close()


def test_a_table_has_a_row_for_each_operation_and_a_column_for_each_size() -> None:
    costs = [
        Cost(operation="get", pages=1000, wall_us=2.0, cpu_us=1.0, ratio=1.0),
        Cost(operation="bytes", pages=10_000, wall_us=400.0, cpu_us=0.0, ratio=None),
        Cost(operation="get", pages=10_000, wall_us=3.0, cpu_us=1.5, ratio=1.5),
    ]

    assert [
        "|  | 1,000 | 10,000 |",
        "| --- | --- | --- |",
        "| get | 2 (1) | 3 (1.5) |",
        "| bytes |  | 400 |",
    ] == table(costs, cost_cell)
    assert "| get | 1.00 | 1.50 |" == table(costs, ratio_cell)[2]
