"""Find out which pages of a prefix L2 and L3 together have in each pool, before any page is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.controller.pools import pool_numbers
from hicache_storage.page_store.lookup import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pools import PoolBits, PoolSet
    from hicache_storage.page_store import PageStore
    from hicache_storage.page_store.results import Verdict


@dataclass(frozen=True, slots=True)
class Availability:
    """The pages of a prefix that L2 has or L3 reports. Only a load proves that L3 has a page."""

    present: list[PoolBits]
    """For each page, the pools that have it."""
    failures: dict[int, Verdict]
    """Pools that could not be looked up, and why."""


def look_up(
    store: PageStore,
    pool_set: PoolSet,
    hit_pools: PoolBits,
    hashes: Sequence[str],
    filled: Sequence[PoolBits],
    *,
    timeout_s: float,
) -> Availability:
    """Look up in L3 the pages that L2 lacks. `filled` gives, for each page, the pools that L2 has.

    The `hit_pools` are looked up first, the required ones before the others. Each pool is looked up only
    for the prefix that the pools before it have. The other pools come last: each is looked up for every
    page of the prefix that the `hit_pools` have. `timeout_s` limits all lookups together.
    """
    deadline = Deadline(timeout_s)
    found = Availability(list(filled), {})
    _match(store, pool_set, pool_set.lookup_order(hit_pools), hashes, found, timeout_s=timeout_s)
    prefix = hashes[: longest(pool_set.usable(found.present, hit_pools))]
    for number in pool_numbers(pool_set.all_pools & ~hit_pools):
        left_s = deadline.remaining_s()
        _match(store, pool_set, [number], prefix, found, timeout_s=left_s, past_gaps=True)
    return found


def _match(
    store: PageStore,
    pool_set: PoolSet,
    numbers: Sequence[int],
    hashes: Sequence[str],
    found: Availability,
    *,
    timeout_s: float,
    past_gaps: bool = False,
) -> None:
    """Look up `hashes` in the pools `numbers`, and add the pages that are present to `found`."""
    parts = [(number, part) for number in numbers for part in pool_set.pools[number].stored]
    pages = range(len(hashes))
    held = [[bool(found.present[page] >> number & 1) for page in pages] for number, _ in parts]
    match = store.match(
        hashes,
        [part for _, part in parts],
        held=held,
        past_gaps=past_gaps,
        timeout_s=timeout_s,
    )
    in_all_parts = dict.fromkeys(numbers, [True] * len(hashes))
    for (number, _), present, failure in zip(parts, match.present, match.failures, strict=True):
        in_all_parts[number] = [a and b for a, b in zip(in_all_parts[number], present, strict=True)]
        if failure is not None:
            found.failures.setdefault(number, failure)
    for number, present in in_all_parts.items():
        for page in pages:
            if present[page]:
                found.present[page] |= 1 << number
