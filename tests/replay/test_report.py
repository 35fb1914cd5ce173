"""The figures of a replay and their tables."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hicache_storage.replay.report import Flow, Tally, Tiers, figures, percentile, tables

_POOL = {"shape": "mha,layers=1", "page_nbytes": 4096}


def _report(tally: Tally, **counters: int) -> dict[str, Any]:
    return {
        "pools": [_POOL | {"name": "kv"}, _POOL | {"name": "draft"}],
        "trace_requests": 9,
        "page_tokens": 64,
        "elapsed_s": 1.25,
        "interrupted": True,
        **figures(
            tally,
            page_tokens=64,
            read=Flow(nbytes=3_000_000_000, busy_s=1.5),
            write=Flow(nbytes=0, busy_s=0.0),
            controller=counters,
            store={"load_corrupt": 2, "load_miss": 0},
            storage={},
        ),
    }


def _text(report: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables(report):
            console.print(table)
    return captured.get()


class TestPlace:
    def test_pages_are_counted_by_tier(self) -> None:
        tally = Tally()

        tally.place(24, 10, [8, 9], 8)

        assert tally.pages == Tiers(l2=8, l3=2, miss=14)

    def test_a_block_is_found_where_all_of_its_pages_are(self) -> None:
        tally = Tally()

        tally.place(24, 15, [], 8)

        assert tally.blocks == Tiers(l2=1, miss=2)

    def test_a_block_comes_from_l3_where_one_of_its_pages_does(self) -> None:
        tally = Tally()

        tally.place(24, 24, [7, 8], 8)

        assert tally.blocks == Tiers(l2=1, l3=2)

    def test_a_loaded_page_of_a_broken_block_makes_no_hit(self) -> None:
        tally = Tally()

        tally.place(16, 9, [8], 8)

        assert tally.blocks == Tiers(l2=1, miss=1)


class TestPercentile:
    @pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
    def test_of_a_hundred_values(self, percent: int, expected: int) -> None:
        assert percentile(list(range(100, 0, -1)), percent) == expected

    def test_of_one_value(self) -> None:
        assert percentile([7.0], 99) == 7.0

    def test_of_none(self) -> None:
        assert percentile([], 50) is None


class TestFigures:
    def test_tokens_are_pages_times_their_size(self) -> None:
        report = _report(Tally(pages=Tiers(l2=1, l3=2, miss=1)))

        expected = {
            "total": 256,
            "l2_hits": 64,
            "l3_hits": 128,
            "misses": 64,
            "hit_rate": 0.75,
        }
        assert expected == report["tokens"]

    def test_bandwidth_counts_busy_time_only(self) -> None:
        report = _report(Tally())

        assert report["l3_read"]["gb_per_s"] == 2.0
        assert report["l3_write"]["gb_per_s"] is None

    def test_a_run_of_nothing_has_figures_and_tables(self) -> None:
        report = _report(Tally())

        assert report["blocks"]["hit_rate"] == 0.0
        assert "corrupt pages" in _text(report)


class TestTables:
    def test_they_show_what_the_figures_say(self) -> None:
        tally = Tally(
            requests=3,
            blocks=Tiers(l2=1, l3=2, miss=1),
            pages=Tiers(l2=8, l3=16, miss=8),
            ideal_block_hits=3,
            paired_pages=23,
            corrupt_pages=5,
            prefetch_s=[0.001, 0.002],
        )

        text = _text(_report(tally, dropped_pages=77, loaded_unused_pages=66))

        for shown in (
            "3 of 9 in 1.2 s, then interrupted",
            "mha,layers=1: 4,096 bytes a page of 64 tokens",
            "2,048",
            "75.0 %",
            "23 of 24 pages found",
            "3.00 GB, 2.00 GB/s",
            "p50 1.00 ms, p99 2.00 ms",
            "66 pages",
            "77 pages",
            "5; 0.00 GB verified",
            "load_corrupt 2",
        ):
            assert shown in text

    def test_the_ideal_stands_below_what_was_found(self) -> None:
        tally = Tally(blocks=Tiers(l2=1, l3=2, miss=1), ideal_block_hits=4)

        lines = [line.split() for line in _text(_report(tally)).splitlines()]

        assert ["L2", "+", "L3", "3", "0", "0", "75.0", "%"] in lines
        assert ["infinite", "cache", "4", "100.0", "%"] in lines

    def test_counters_of_nothing_are_left_out(self) -> None:
        assert "load_miss" not in _text(_report(Tally()))

    def test_pages_that_were_not_stored_are_told_by_reason(self) -> None:
        report = figures(
            Tally(),
            page_tokens=64,
            read=Flow(nbytes=0, busy_s=0.0),
            write=Flow(nbytes=0, busy_s=0.0),
            controller={"dropped_pages": 3},
            store={},
            storage={},
            unsaved=[{"refused": 1200, "timeout": 4}, {"refused": 5}],
        )

        expected = {"total": 1212, "dropped": 3, "refused": 1205, "timeout": 4}
        assert expected == report["unsaved_pages"]
        assert (
            "1,212 pages: 3 dropped from the write queue, 1,205 refused by the storage, 4 timed out"
            in _text(_report(Tally()) | {"unsaved_pages": expected})
        )

    def test_writes_that_did_not_end_in_time_are_told(self) -> None:
        assert "writes unfinished" in _text(_report(Tally()) | {"drained": False})
        assert "writes unfinished" not in _text(_report(Tally()))

    def test_a_note_is_shown(self) -> None:
        assert "too fast" in _text(_report(Tally()) | {"notes": ["too fast"]})

    def test_both_stores_of_a_swap_have_their_counters(self) -> None:
        swap = {
            "begun": True,
            "drained": True,
            "attached": True,
            "complaint": None,
            "took_s": 1.0,
            "backend": "redis",
            "after_requests": 3,
            "store": {"load_ok": 4},
            "storage": {"links_opened": 5},
        }

        text = _text(_report(Tally()) | {"swap": swap})

        assert ("load_ok 4" in text, "links_opened 5" in text) == (True, True)

    def test_a_single_pool_has_no_pairs(self) -> None:
        report = _report(Tally()) | {"pools": [_POOL | {"name": "kv"}]}

        assert "paired" not in _text(report)
