"""Results of adapters whose stores do not return one bool a page."""

from __future__ import annotations

import pytest
from field.adapter import results_from_batch_flag, results_from_prefix_counts

from hicache_storage.errors import UnsupportedOperation


@pytest.mark.parametrize("present", ["", "a", "ab", "b", "ac", "bc", "abc", "c"])
def test_each_page_has_a_verdict_where_only_leading_ones_are_counted(present: str) -> None:
    asked: list[list[str]] = []

    def leading(keys: list[str]) -> int:
        asked.append(keys)
        return next((at for at, key in enumerate(keys) if key not in present), len(keys))

    assert [key in present for key in "abc"] == results_from_prefix_counts(leading, ["a", "b", "c"])
    assert len(asked) <= 3


def test_complete_pages_are_requested_once() -> None:
    asked: list[list[str]] = []

    def leading(keys: list[str]) -> int:
        asked.append(keys)
        return len(keys)

    results_from_prefix_counts(leading, ["a", "b"])
    assert [["a", "b"]] == asked


def test_no_page_needs_no_call() -> None:
    assert [] == results_from_prefix_counts(lambda _: 1 // 0, [])


@pytest.mark.parametrize(("stored", "count"), [(True, 3), (True, 0), (False, 1)])
def test_one_verdict_is_that_of_every_page_where_it_can_be(*, stored: bool, count: int) -> None:
    assert [stored] * count == results_from_batch_flag(stored, count)


def test_a_refused_batch_does_not_name_the_page() -> None:
    with pytest.raises(UnsupportedOperation, match="3 pages without saying which"):
        results_from_batch_flag(False, 3)
