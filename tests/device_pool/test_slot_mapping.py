"""The slots that the pages of a transfer have in each pool, and refused slots."""

from __future__ import annotations

import pytest
from device_groups import DRAFT, MHA, make_pool

from hicache_storage.device_pool.slot_mapping import map_slots

POOLS = [make_pool(MHA).layered, make_pool(DRAFT).layered]


def test_a_page_has_one_slot_on_the_device_and_one_in_each_pool_of_l2() -> None:
    target, draft = map_slots(POOLS, [[5, 0], [1, 2]], [3, 4], None)

    assert ([5, 0], [3, 4]) == (target.host_slots, target.device_slots)
    assert ([1, 2], [3, 4]) == (draft.host_slots, draft.device_slots)


def test_a_pool_that_lacks_pages_has_slots_for_the_others() -> None:
    _, draft = map_slots(POOLS, [[5, 0, 1], [2, 3]], [3, 4, 0], [[0, 1, 2], [0, 2]])

    assert ([2, 3], [3, 0]) == (draft.host_slots, draft.device_slots)


@pytest.mark.parametrize(
    ("host_slots", "device_slots", "indices", "message"),
    [
        ([[0]], [0], None, r"1 pages of 2 pools need \[1, 1\] host slots, not \[1\]"),
        ([[0, 1], [0]], [0, 1], None, r"need \[2, 2\] host slots, not \[2, 1\]"),
        ([[0, 1], [0]], [0, 1], [[0, 1]], r"need \[2\] host slots, not \[2, 1\]"),
        ([[0, 1]], [0, 1], [[0, 1]], r"2 pages of 2 pools need \[2\]"),
        ([[0, 1], [0]], [0, 1], [[0, 1], []], r"need \[2, 0\] host slots, not \[2, 1\]"),
        ([[0], [0]], [5], None, "no device slot 5: they are numbered 0 to 4"),
        ([[0], [0]], [-1], None, "no device slot -1"),
        ([[6], [0]], [0], None, "no host slot 6: they are numbered 0 to 5"),
        ([[0], [-1]], [0], None, "no host slot -1"),
        ([[0], [0]], [0], [[0], [1]], "no page 1: they are numbered 0 to 0"),
        ([[0, 1], [0, 1]], [3, 3], None, "device slot 3 is named twice"),
        ([[0, 1], [2, 2]], [3, 4], None, "host slot 2 is named twice"),
        ([[0, 1], [2, 3]], [3, 4], [[0, 1], [1, 1]], "page 1 is named twice"),
    ],
)
def test_invalid_slots_are_refused(
    host_slots: list[list[int]],
    device_slots: list[int],
    indices: list[list[int]] | None,
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        map_slots(POOLS, host_slots, device_slots, indices)
