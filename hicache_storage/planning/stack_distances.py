"""Compute LRU stack distances in O(n log n), without a loop over the accesses.

The distance of an access is the number of other items that were used since the item's previous use. An
LRU cache of C items hits the access if the distance is less than C. So one array of distances gives the
hits for every capacity.

The items used after position p and before position t are the accesses in between whose own previous
use is before p. Every access up to p has that property, too. So the distance is the number of
accesses before t whose previous use is before p, minus the p + 1 accesses up to p.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = "npt.NDArray[np.int64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"

NEVER = 1 << 40
"""The distance of an item that was not used before, because no cache is large enough."""


def stack_distances(previous: Integers, positions: Integers, until: Integers) -> Integers:
    """Return the number of other items used after `positions` and before `until`, for each query.

    Args:
        previous: For each use in time order, the position of the item's previous use, or -1.
        positions: For each query, the position of the item's latest use. -1 gives `NEVER`.
        until: For each query, the position at which the count ends.
    """
    counts = count_smaller(previous + 1, until, positions + 1)
    return np.where(positions < 0, NEVER, counts - positions - 1)


def count_smaller(values: Integers, ends: Integers, limits: Integers) -> Integers:
    """Return, for each query, how many of `values[:end]` are less than `limit`. No value is negative.

    All queries descend a wavelet matrix together. Each round sorts the values by one bit.
    """
    counts = np.zeros(len(ends), np.int64)
    if not len(values) or not len(ends):
        return counts
    left, right = np.zeros(len(ends), np.int64), ends.astype(np.int64)
    highest = max(int(values.max()), int(limits.max()))
    for bit in reversed(range(highest.bit_length())):
        is_one = (values >> bit & 1).astype(bool)
        zeros_before = np.concatenate(([0], np.cumsum(~is_one)))
        left_zeros, right_zeros = zeros_before[left], zeros_before[right]
        beyond = (limits >> bit & 1).astype(bool)
        counts += np.where(beyond, right_zeros - left_zeros, 0)
        zeros = int(zeros_before[-1])
        left = np.where(beyond, zeros + left - left_zeros, left_zeros)
        right = np.where(beyond, zeros + right - right_zeros, right_zeros)
        values = np.concatenate((values[~is_one], values[is_one]))
    return counts


def running_max(values: Integers, segments: Integers) -> Integers:
    """Return the largest value so far within each segment. The numbers in `segments` ascend."""
    offsets = segments * (2 * NEVER)
    return np.maximum.accumulate(values + offsets) - offsets


def previous_in_group(order: Integers, groups: Integers, marks: Mask) -> Integers:
    """Return, for each element, the latest earlier element of its group that is marked, or -1.

    `order` sorts the elements by group, then by time.
    """
    size = len(order)
    places = np.arange(size)
    marked = np.where(marks[order], places, -1)
    latest = np.concatenate(([-1], np.maximum.accumulate(marked)[:-1])) if size else marked
    ordered = groups[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1])) if size else marks
    starts = np.maximum.accumulate(np.where(is_first, places, 0)) if size else places
    found = np.full(size, -1, np.int64)
    found[order] = np.where(latest >= starts, order[latest], -1)
    return found
