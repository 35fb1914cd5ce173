"""Decide which stripe has a page, by rendezvous hashing.

Each stripe draws a number for each page from its name and the page's hash, and the largest one wins.
So the order of the stripes does not matter, and a stripe that is added or removed moves its own share of
the pages only. With weights, the number is -w / ln(u) for a uniform u in (0, 1).

Sources: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions
on Networking 6(1), 1998; with weights: Resch, "New hashing algorithms for data storage", SDC 2015.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_REMEMBERED = 1 << 16
_RANGE = 2.0**64


class Placement:
    """The stripe of each page. Thread-safe."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """Give each stripe its share of the pages, by name."""
        seeds = [xxhash.xxh3_64_intdigest(name.encode()) for name in shares]
        weights = list(shares.values())
        digest = xxhash.xxh3_64_intdigest

        def place(page_hash: str) -> int:
            name = page_hash.encode()
            draws: list[float] = [digest(name, seed) for seed in seeds]
            if min(weights) < max(weights):
                draws = [
                    -weight / math.log((draw + 0.5) / _RANGE)
                    for draw, weight in zip(draws, weights, strict=True)
                ]
            return draws.index(max(draws))

        self.stripe_of: Callable[[str], int] = lru_cache(_REMEMBERED)(place)
        """Returns the index of a page's stripe."""

    def split(self, hashes: Sequence[str]) -> dict[int, list[int]]:
        """Return the positions of the pages of each stripe that has some, by the stripe's index."""
        places: dict[int, list[int]] = {}
        for position, stripe in enumerate(map(self.stripe_of, hashes)):
            places.setdefault(stripe, []).append(position)
        return places
