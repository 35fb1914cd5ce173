"""What a storage is asked about a prefix, and in which order."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.hit_policy import Pool
    from hicache_storage.keys import KeySpace


class Question:
    """Which of a prefix's pages one pool has, of those that the caller has not."""

    def __init__(
        self, framed: KeySpace, hashes: Sequence[str], there: list[bool], pages: int
    ) -> None:
        self.framed = framed
        self.there = there
        self.asked = [page for page in range(pages) if not there[page]]
        self._hashes = hashes

    def parts(self, max_batch: int | None) -> Iterator[slice]:
        """What is asked, in calls that the storage takes."""
        return cuts(len(self.asked), max_batch or max(1, len(self.asked)))

    def of(self, part: slice) -> list[str]:
        """The hashes of one call."""
        return [self._hashes[page] for page in self.asked[part]]

    def answer(self, part: slice, answers: list[bool]) -> None:
        """What the storage said to one call."""
        for page, answer in zip(self.asked[part], answers, strict=True):
            self.there[page] = answer


def asked_together(pools: Sequence[Pool]) -> list[list[int]]:
    """The pools in their order; of the parts of one, first the first and then all the others."""
    groups: list[list[int]] = []
    for _, parts in groupby(range(len(pools)), key=lambda number: pools[number].space.pool):
        first, *others = parts
        groups += [[first], others] if others else [[first]]
    return groups


def cuts(length: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that make up `length`."""
    return (slice(start, min(start + step, length)) for start in range(0, length, step))
