"""What the adapters of other people's stores make of answers that are not one bool a page."""

from __future__ import annotations

import pytest
from field.adapter import verdicts_of_batch, verdicts_of_prefixes

from hicache_storage.errors import UnsupportedOperation


@pytest.mark.parametrize("present", ["", "a", "ab", "b", "ac", "bc", "abc", "c"])
def test_each_page_has_a_verdict_where_only_leading_ones_are_counted(present: str) -> None:
    asked: list[list[str]] = []

    def leading(keys: list[str]) -> int:
        asked.append(keys)
        return next((at for at, key in enumerate(keys) if key not in present), len(keys))

    assert [key in present for key in "abc"] == verdicts_of_prefixes(leading, ["a", "b", "c"])
    assert len(asked) <= 3


def test_what_is_all_there_is_asked_for_once() -> None:
    asked: list[list[str]] = []

    def leading(keys: list[str]) -> int:
        asked.append(keys)
        return len(keys)

    verdicts_of_prefixes(leading, ["a", "b"])
    assert [["a", "b"]] == asked


def test_no_page_needs_no_call() -> None:
    assert [] == verdicts_of_prefixes(lambda _: 1 // 0, [])


@pytest.mark.parametrize(("stored", "count"), [(True, 3), (True, 0), (False, 1)])
def test_one_verdict_is_that_of_every_page_where_it_can_be(*, stored: bool, count: int) -> None:
    assert [stored] * count == verdicts_of_batch(stored, count)


def test_a_refused_batch_does_not_tell_which_page() -> None:
    with pytest.raises(UnsupportedOperation, match="3 pages without saying which"):
        verdicts_of_batch(False, 3)
