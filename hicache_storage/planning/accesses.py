"""The accesses of a trace: which block each request uses, where in its prompt, and in which order.

Like a page, a block is named by a hash of the whole prefix, so equal ids after different prefixes are
different blocks. A spatial sample keeps a share of the blocks, each with all of its accesses (SHARDS,
Waldspurger et al., FAST 2015).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_storage.planning.stack_distances import (
    Integers,
    Mask,
    previous_in_group,
    running_max,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.replay.trace import Request

Hashes: TypeAlias = "npt.NDArray[np.uint64]"

_BUCKETS = 1 << 24
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """The accesses of a trace, or of a sample of its blocks, one request after the other.

    The arrays have an element for each access. Within a request, elements are in the order in which L2
    touches the blocks, unless the field says otherwise.
    """

    requests: Integers
    """The number of the request. The numbers ascend."""
    starts: Integers
    """The position of the request's first access."""
    blocks: Integers
    """The number of the block."""
    by_block: Integers
    """The accesses, sorted by block, then by time."""
    touches: Integers
    """For the blocks in prompt order, the positions of their accesses."""
    names: Hashes
    """For the blocks in prompt order, the hash of the prefix that ends with the block."""
    rate: float
    """The share of the trace's blocks in this sample."""
    expected: float
    """The average number of accesses in samples of this rate. This sample may have more or fewer."""

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Return all accesses of a trace."""
        lengths = np.array([len(request.blocks) for request in requests], np.int64)
        ids = np.fromiter(
            chain.from_iterable(request.blocks for request in requests),
            np.uint64,
            count=int(lengths.sum()),
        )
        numbers = np.repeat(np.arange(len(requests)), lengths)
        return cls._make(numbers, _prefix_hashes(ids, lengths), 1.0, float(len(ids)))

    def __len__(self) -> int:
        return len(self.requests)

    def sampled(self, rate: float) -> Self:
        """Return a sample of about `rate` of the trace's blocks."""
        return self._kept(self._buckets() < rate * _BUCKETS, rate)

    def parts(self, count: int) -> list[Self]:
        """Split these accesses into `count` disjoint samples of equal rates."""
        step = self.rate * _BUCKETS / count
        part = np.minimum(self._buckets() // step, count - 1)
        return [self._kept(part == number, self.rate / count) for number in range(count)]

    def latest(self, marks: Mask) -> Integers:
        """Return, for each access, the latest earlier access to its block that is marked, or -1."""
        return previous_in_group(self.by_block, self.blocks, marks)

    def following(self, marks: Mask) -> Integers:
        """Return, for each access, the next later access to its block that is marked, or -1."""
        last = len(self) - 1
        latest = previous_in_group(last - self.by_block[::-1], self.blocks[::-1], marks[::-1])[::-1]
        return np.where(latest >= 0, last - latest, -1)

    def largest_so_far(self, values: Integers) -> Integers:
        """Return, for each access, the largest value among the prompt's blocks up to this one."""
        largest = np.empty_like(values)
        largest[self.touches] = running_max(values[self.touches], self.requests)
        return largest

    def _kept(self, kept: Mask, rate: float) -> Self:
        expected = self.expected / self.rate * rate
        return self._make(self.requests[kept], self.names[kept], rate, expected)

    def _buckets(self) -> Integers:
        return (_mixed(self.names) >> np.uint64(40)).astype(np.int64)

    @classmethod
    def _make(cls, requests: Integers, names: Hashes, rate: float, expected: float) -> Self:
        positions = np.arange(len(requests))
        is_start = np.diff(requests, prepend=-1) != 0
        starts = np.maximum.accumulate(np.where(is_start, positions, 0))
        _, firsts, blocks = np.unique(names, return_index=True, return_inverse=True)
        is_new = np.zeros(len(requests), bool)
        is_new[firsts] = True
        touches = _touches(starts, is_start, is_new)
        touched = np.empty(len(requests), np.int64)
        touched[touches] = blocks.reshape(-1)
        return cls(
            requests=requests,
            starts=starts,
            blocks=touched,
            by_block=np.argsort(touched, kind="stable"),
            touches=touches,
            names=names,
            rate=rate,
            expected=expected,
        )


def _touches(starts: Integers, is_start: Mask, is_new: Mask) -> Integers:
    """Return, for the blocks in prompt order, the positions at which L2 touches them.

    The controller unpins the prefix that it found from the last block to the first, then the computed
    rest in the same order. The end of a prompt is therefore evicted before its beginning.
    """
    if not len(starts):
        return starts
    segment = np.cumsum(is_start) - 1
    lengths = np.bincount(segment)
    known = np.bincount(segment, weights=~is_new).astype(np.int64)
    positions = np.arange(len(starts))
    last_known = starts + known[segment] - 1
    last = starts + lengths[segment] - 1
    # Reverse the found prefix in place, and also the rest after it.
    is_known = positions <= last_known
    touches: Integers = np.where(is_known, starts + last_known, last_known + 1 + last) - positions
    return touches


def _prefix_hashes(ids: Hashes, lengths: Integers) -> Hashes:
    """Hash each prompt up to the end of each block. Handle one position of all prompts at a time."""
    hashes = np.empty_like(ids)
    starts = np.cumsum(lengths) - lengths
    longest_first = np.argsort(-lengths, kind="stable")
    ordered_starts, ordered_lengths = starts[longest_first], lengths[longest_first]
    so_far = np.zeros(len(lengths), np.uint64)
    for place in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(-ordered_lengths, -place, side="left"))
        positions = ordered_starts[:active] + place
        so_far[:active] = _mixed(so_far[:active] + _mixed(ids[positions]))
        hashes[positions] = so_far[:active]
    return hashes


def _mixed(values: Hashes) -> Hashes:
    """Return 64-bit hashes with their bits mixed (splitmix64)."""
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(31))
