from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import space

from hicache_storage.page_store.hit_policy import HitPolicy, PoolSpec, usable_lengths, usable_prefix

TARGET = PoolSpec(space=space())
DRAFT = PoolSpec(space=space(pool="draft"))


def trailing(window_pages: int) -> PoolSpec:
    return PoolSpec(
        space=space(pool="swa"), hit_policy=HitPolicy.TRAILING_PAGES, window_pages=window_pages
    )


def bits(text: str) -> list[bool]:
    return [digit == "1" for digit in text]


@pytest.mark.parametrize(
    ("target", "draft", "prefix"),
    [
        ("1111", "1111", 4),
        ("1111", "1100", 2),
        ("1011", "1111", 1),
        ("0111", "1111", 0),
        ("", "", 0),
    ],
)
def test_a_prefix_ends_where_the_first_pool_has_a_hole(
    target: str, draft: str, prefix: int
) -> None:
    assert prefix == usable_prefix([TARGET, DRAFT], [bits(target), bits(draft)])


@pytest.mark.parametrize(
    ("side", "window_pages", "prefix"),
    [
        ("0011", 2, 4),
        ("0111", 3, 4),
        ("0110", 2, 3),
        ("0001", 2, 0),
        ("1000", 2, 1),
        ("0101", 1, 4),
    ],
)
def test_a_trailing_pool_needs_its_last_pages_only(
    side: str, window_pages: int, prefix: int
) -> None:
    pools = [TARGET, trailing(window_pages)]

    assert prefix == usable_prefix(pools, [bits("1111"), bits(side)])


def test_with_a_trailing_pool_a_longer_prefix_can_be_usable_where_a_shorter_is_not() -> None:
    usable = usable_lengths([TARGET, trailing(1)], [bits("1111"), bits("1001")])

    assert [True, True, False, False, True] == usable


@given(
    st.integers(0, 8).flatmap(
        lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=3, max_size=3)
    ),
    st.integers(1, 9),
)
def test_lengths_agree_with_the_definition(present: list[list[bool]], window_pages: int) -> None:
    pools = [TARGET, DRAFT, trailing(window_pages)]
    target, draft, side = present

    wanted = [
        all(target[:end]) and all(draft[:end]) and all(side[max(0, end - window_pages) : end])
        for end in range(len(target) + 1)
    ]

    assert wanted == usable_lengths(pools, present)


def test_a_pool_has_a_bare_key_space() -> None:
    with pytest.raises(ValueError, match="bare"):
        PoolSpec(space=space(frame_nbytes=128))


def test_a_window_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="window_pages"):
        trailing(0)
