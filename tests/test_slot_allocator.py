from __future__ import annotations

import pytest

from hicache_storage.slot_allocator import SlotAllocator


def test_slots_are_given_in_the_order_in_which_they_were_freed() -> None:
    slots = SlotAllocator(3)
    assert [0, 1, 2] == slots.allocate(3)

    slots.free([1])
    slots.free([0])

    assert [1, 0] == slots.allocate(2)


def test_more_than_there_are_is_none_and_takes_nothing() -> None:
    slots = SlotAllocator(3)

    assert slots.allocate(4) is None
    assert 3 == slots.free_count


@pytest.mark.parametrize("freed", [[0, 0], [0, 2], [0, -1], [0, 5]])
def test_a_slot_that_is_not_in_use_cannot_be_freed_and_nothing_is(freed: list[int]) -> None:
    slots = SlotAllocator(3)
    slots.allocate(2)

    with pytest.raises(ValueError, match="is not in use"):
        slots.free(freed)

    assert 1 == slots.free_count
    assert slots.is_used(0)


def test_a_slot_is_used_from_its_allocation_until_it_is_freed() -> None:
    slots = SlotAllocator(2)
    assert not slots.is_used(0)

    slots.allocate(1)
    assert slots.is_used(0)
    assert not slots.is_used(1)
    assert not slots.is_used(2)
    assert not slots.is_used(-1)

    slots.free([0])
    assert not slots.is_used(0)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be at least 0, not -1"):
        SlotAllocator(1).allocate(-1)
