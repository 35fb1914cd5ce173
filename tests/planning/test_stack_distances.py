"""Stack distances, compared with an LRU list that is kept access by access."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hicache_storage.planning.stack_distances import (
    NEVER,
    count_smaller,
    previous_in_group,
    running_max,
    stack_distances,
)


def _naive(items: list[int]) -> list[int]:
    """Return the place of each access in a list of the items, most recent first."""
    recent: list[int] = []
    distances: list[int] = []
    for item in items:
        distances.append(recent.index(item) if item in recent else NEVER)
        if item in recent:
            recent.remove(item)
        recent.insert(0, item)
    return distances


@pytest.mark.parametrize("seed", range(5))
def test_distances_are_those_of_an_lru_list(seed: int) -> None:
    rng = random.Random(seed)
    items = [int(rng.paretovariate(0.5)) % 60 for _ in range(400)]
    groups = np.array(items)
    order = np.argsort(groups, kind="stable")
    previous = previous_in_group(order, groups, np.ones(400, bool))

    found = stack_distances(previous, previous, np.arange(400))

    assert _naive(items) == found.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_smaller_values_in_front_are_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, ends, limits = (rng.integers(0, 100, 100) for _ in range(3))

    counts = count_smaller(values, ends, limits)

    expected = [int((values[:end] < limit).sum()) for end, limit in zip(ends, limits, strict=True)]
    assert expected == counts.tolist()


def test_no_value_is_smaller_among_none() -> None:
    none = np.zeros(0, np.int64)

    assert [0] == count_smaller(none, np.array([0]), np.array([5])).tolist()


def test_the_largest_value_so_far_begins_anew_in_each_segment() -> None:
    values, segments = np.array([3, 1, NEVER, 2, 0, 1]), np.array([0, 0, 0, 1, 1, 4])

    assert [3, 3, NEVER, 2, 2, 1] == running_max(values, segments).tolist()


def test_only_marked_elements_of_the_same_group_count() -> None:
    groups = np.array([7, 5, 7, 5, 7])
    order = np.argsort(groups, kind="stable")
    marks = np.array([True, False, False, True, True])

    assert [-1, -1, 0, -1, 0] == previous_in_group(order, groups, marks).tolist()
