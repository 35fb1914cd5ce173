"""Tables of a replay's report."""

from __future__ import annotations

from typing import Any

from replays import POOL, SWAP_FIGURES, report_of
from rich.console import Console

from hicache_storage.replay.report import RequestCounts, Throughput, TierCounts, figures
from hicache_storage.replay.tables import tables


def _text(report: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


def test_tables_show_the_figures() -> None:
    counts = RequestCounts(
        requests=3,
        blocks=TierCounts(l2=1, l3=2, miss=1),
        pages=TierCounts(l2=8, l3=16, miss=8),
        ideal_block_hits=3,
        paired_pages=23,
        corrupt_pages=5,
        prefetch_s=[0.001, 0.002],
    )

    text = _text(report_of(counts, dropped_pages=77, loaded_unused_pages=66))

    for shown in (
        "3 of 9 in 1.2 s, then interrupted",
        "mha,layers=1: 4 KiB a page of 64 tokens",
        "2,048",
        "75.0 %",
        "23 of 24 pages found",
        "2.79 GiB, 1.86 GiB/s",
        "p50 1.00 ms, p99 2.00 ms",
        "66 pages",
        "77 pages",
        "5; 0 B verified",
        "load_corrupt 2",
    ):
        assert shown in text


def test_the_ideal_is_below_the_hits() -> None:
    counts = RequestCounts(blocks=TierCounts(l2=1, l3=2, miss=1), ideal_block_hits=4)

    lines = [line.split() for line in _text(report_of(counts)).splitlines()]

    assert ["L2", "+", "L3", "3", "0", "0", "75.0", "%"] in lines
    assert ["infinite", "cache", "4", "100.0", "%"] in lines


def test_zero_counters_are_left_out() -> None:
    assert "load_miss" not in _text(report_of(RequestCounts()))


def test_pages_that_were_not_stored_are_shown_by_reason() -> None:
    report = figures(
        RequestCounts(),
        page_tokens=64,
        read=Throughput(nbytes=0, busy_s=0.0),
        write=Throughput(nbytes=0, busy_s=0.0),
        controller={"dropped_pages": 3},
        store={},
        storage={},
        unsaved=[{"refused": 1200, "timeout": 4}, {"refused": 5}],
    )

    expected = {"total": 1212, "dropped": 3, "refused": 1205, "timeout": 4}
    assert expected == report["unsaved_pages"]
    assert (
        "1,212 pages: 3 dropped from the write queue, 1,205 refused by the storage, 4 timed out"
        in _text(report_of(RequestCounts()) | {"unsaved_pages": expected})
    )


def test_unfinished_writes_are_shown() -> None:
    assert "writes unfinished" in _text(report_of(RequestCounts()) | {"drained": False})
    assert "writes unfinished" not in _text(report_of(RequestCounts()))


def test_writes_that_the_storage_refused_are_not_called_slow() -> None:
    report = report_of(RequestCounts()) | {"drained": False}

    assert "took too long" in _text(report | {"unsaved_pages": {"total": 3, "dropped": 3}})
    assert "took too long" not in _text(report | {"unsaved_pages": {"total": 3, "refused": 3}})


def test_a_note_is_shown() -> None:
    assert "too fast" in _text(report_of(RequestCounts()) | {"notes": ["too fast"]})


def test_both_stores_of_a_swap_have_their_counters() -> None:
    swap = {**SWAP_FIGURES, "store": {"load_ok": 4}, "storage": {"links_opened": 5}}

    text = _text(report_of(RequestCounts()) | {"swap": swap})

    assert ("load_ok 4" in text, "links_opened 5" in text) == (True, True)


def test_a_single_pool_has_no_pairs() -> None:
    report = report_of(RequestCounts()) | {"pools": [POOL | {"name": "kv"}]}

    assert "paired" not in _text(report)
