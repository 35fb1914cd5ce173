"""Figures of a replay, of one rank and of several."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from replays import SWAP_FIGURES, report_of

from hicache_storage.errors import HiCacheError
from hicache_storage.replay.report import RequestCounts, TierCounts, combine_ranks, percentile


class TestAddPrompt:
    def test_pages_are_counted_by_tier(self) -> None:
        counts = RequestCounts()

        counts.add_prompt(24, 10, [8, 9], 8)

        assert counts.pages == TierCounts(l2=8, l3=2, miss=14)

    def test_a_block_is_found_where_all_of_its_pages_are(self) -> None:
        counts = RequestCounts()

        counts.add_prompt(24, 15, [], 8)

        assert counts.blocks == TierCounts(l2=1, miss=2)

    def test_a_block_comes_from_l3_where_one_of_its_pages_does(self) -> None:
        counts = RequestCounts()

        counts.add_prompt(24, 24, [7, 8], 8)

        assert counts.blocks == TierCounts(l2=1, l3=2)

    def test_a_loaded_page_of_a_broken_block_makes_no_hit(self) -> None:
        counts = RequestCounts()

        counts.add_prompt(16, 9, [8], 8)

        assert counts.blocks == TierCounts(l2=1, miss=1)


class TestPercentile:
    @pytest.mark.parametrize("percent", [1, 50, 99, 100])
    def test_of_a_hundred_values_and_of_one(self, percent: int) -> None:
        assert percentile(list(range(100, 0, -1)), percent) == percent
        assert percentile([7.0], percent) == 7.0

    def test_of_none(self) -> None:
        assert percentile([], 50) is None


class TestFigures:
    def test_tokens_are_pages_times_their_size(self) -> None:
        report = report_of(RequestCounts(pages=TierCounts(l2=1, l3=2, miss=1)))

        expected = {
            "total": 256,
            "l2_hits": 64,
            "l3_hits": 128,
            "misses": 64,
            "hit_rate": 0.75,
        }
        assert expected == report["tokens"]

    def test_bandwidth_counts_busy_time_only(self) -> None:
        report = report_of(RequestCounts())

        assert report["l3_read"]["gb_per_s"] == 2.0
        assert report["l3_write"]["gb_per_s"] is None

    def test_a_run_without_requests_has_figures(self) -> None:
        assert report_of(RequestCounts())["blocks"]["hit_rate"] == 0.0


_RANK: dict[str, Any] = {
    "elapsed_s": 1.0,
    "requests": 2,
    "blocks": {"l2_hits": 1, "l3_hits": 0},
    "pages": {"l2_hits": 8, "l3_hits": 0},
    "tokens": {"l2_hits": 512, "l3_hits": 0},
    "paired_pages": 8,
    "l3_read": {"nbytes": 100, "busy_s": 1.0},
    "l3_write": {"nbytes": 0, "busy_s": 0.0},
    "prefetch": {"p50_s": 0.1, "p99_s": None},
    "loaded_unused_pages": 1,
    "dropped_write_pages": 2,
    "unreserved_pages": 3,
    "verified_nbytes": 4,
    "corrupt_pages": 5,
    "controller": {"a": 1},
    "store": {"save_ok": 6, "load_ok": 7},
    "storage": {},
    "unsaved_pages": {"total": 3, "refused": 2, "dropped": 1},
    "drained": True,
    "left_pages": 0,
    "pools": [{"name": "kv", "space": "a", "spaces": ["a"]}],
    "faults": None,
    "swap": None,
}


class TestCombineRanks:
    def two(self, **changes: Any) -> list[dict[str, Any]]:
        """Return the figures of two ranks, the second with `changes`."""
        return [deepcopy(_RANK), {**deepcopy(_RANK), **changes}]

    def test_counters_of_ranks_are_added_up(self) -> None:
        report = combine_ranks(self.two(store={"save_ok": 1, "healed": 1}, corrupt_pages=0))

        assert report["corrupt_pages"] == 5
        assert report["verified_nbytes"] == 8
        assert report["store"] == {"healed": 1, "load_ok": 7, "save_ok": 7}
        assert report["ranks"] == {"size": 2, "written_pages": [6, 1], "loaded_pages": [7, 0]}

    def test_pages_that_were_not_stored_are_added_up_by_reason(self) -> None:
        report = combine_ranks(self.two(unsaved_pages={"total": 4, "timeout": 4}, drained=False))

        expected = {"total": 7, "dropped": 1, "refused": 2, "timeout": 4}
        assert (expected, False) == (report["unsaved_pages"], report["drained"])

    def test_key_spaces_of_all_ranks_are_named(self) -> None:
        other = [{"name": "kv", "space": "b", "spaces": ["b", "a"]}]

        assert combine_ranks(self.two(pools=other))["pools"][0]["spaces"] == ["a", "b"]

    def test_pages_written_after_a_swap_count_as_written(self) -> None:
        swap = {**SWAP_FIGURES, "store": {"save_ok": 10}}
        report = combine_ranks(
            [{**deepcopy(_RANK), "swap": swap}, {**deepcopy(_RANK), "swap": swap}]
        )

        assert report["ranks"]["written_pages"] == [16, 16]

    def test_bandwidth_is_of_all_bytes_in_the_longest_time(self) -> None:
        report = combine_ranks(self.two(l3_read={"nbytes": 300, "busy_s": 4.0}))

        assert report["l3_read"] == {"nbytes": 400, "busy_s": 4.0, "gb_per_s": 1e-7}

    def test_a_page_that_one_rank_loaded_counts_for_l3(self) -> None:
        report = combine_ranks(self.two(pages={"l2_hits": 3, "l3_hits": 5}))

        assert report["pages"] == {"l2_hits": 3, "l3_hits": 5}

    def test_ranks_that_found_different_prefixes_are_an_error(self) -> None:
        with pytest.raises(HiCacheError, match=r"different lengths: \[8, 7\] pages"):
            combine_ranks(self.two(pages={"l2_hits": 7, "l3_hits": 0}))

    def test_faults_and_swaps_are_added_up(self) -> None:
        swap = {**SWAP_FIGURES, "store": {"x": 1}}
        first = {**deepcopy(_RANK), "swap": swap, "faults": {"plan": "p", "struck": {"a": 1}}}
        second = {**deepcopy(first), "swap": {**swap, "attached": False, "complaint": "down"}}
        report = combine_ranks([first, second])

        assert report["faults"] == {"plan": "p", "struck": {"a": 2}}
        assert (report["swap"]["attached"], report["swap"]["complaint"]) == (False, "down")
        assert report["swap"]["store"] == {"x": 2}
