"""What L2 and L3 together say that they have of a prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.pool_set import numbers
from hicache_storage.page_store.lookup import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits, PoolSet
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.results import Verdict


@dataclass(frozen=True, slots=True)
class Survey:
    """Only a load proves it."""

    present: list[Bits]
    """For each page, the pools that have it."""
    failures: dict[int, Verdict]
    """Pools of which the store could not say what it has."""


def survey(
    store: PageStore,
    pool_set: PoolSet,
    vital: Bits,
    hashes: Sequence[str],
    filled: Sequence[Bits],
    *,
    timeout_s: float,
) -> Survey:
    """Ask the store for what L2 lacks: `filled` tells which pools L2 has of each page.

    Required pools are asked first, and each pool only for the prefix that those before it left. Pools
    that are not `vital` are asked last, each for every page of the prefix that the vital ones have. All
    of them together are given `timeout_s`.
    """
    deadline = Deadline(timeout_s)
    found = Survey(list(filled), {})
    _ask(store, pool_set, pool_set.in_order(vital), hashes, found=found, timeout_s=timeout_s)
    length = longest(pool_set.usable(found.present, vital))
    for number in numbers(pool_set.everything & ~vital):
        prefix, left_s = hashes[:length], deadline.remaining_s()
        _ask(store, pool_set, [number], prefix, found=found, timeout_s=left_s, past_gaps=True)
    return found


def _ask(
    store: PageStore,
    pool_set: PoolSet,
    chosen: Sequence[int],
    hashes: Sequence[str],
    *,
    found: Survey,
    timeout_s: float,
    past_gaps: bool = False,
) -> None:
    parts = [(number, part) for number in chosen for part in pool_set.pools[number].stored]
    pages = range(len(hashes))
    held = [[bool(found.present[page] >> number & 1) for page in pages] for number, _ in parts]
    match = store.match(
        hashes,
        [part for _, part in parts],
        held=held,
        past_gaps=past_gaps,
        timeout_s=timeout_s,
    )
    whole = dict.fromkeys(chosen, [True] * len(hashes))
    for (number, _), there, failure in zip(parts, match.present, match.failures, strict=True):
        whole[number] = [a and b for a, b in zip(whole[number], there, strict=True)]
        if failure is not None:
            found.failures.setdefault(number, failure)
    for number, there in whole.items():
        bit = 1 << number
        for page, present in enumerate(there):
            if present:
                found.present[page] |= bit
