"""KV-309: a store that evicts does not begin with the pages that were just set or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.small_stores import SmallStore, small_store

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_conformance.run.outcomes import Violation

_TIMES_FULL = 3
"""How often a check fills a store: a random choice then hardly leaves any of the first pages."""
_GROUP = 4
"""The least pages of a group. Chance does not keep one group whole and evict the whole other."""
_FEW_SHARE = 0.25
"""A group of which no more than this part is left counts as gone."""


@check("KV-309")
def what_was_just_set_is_not_evicted_first(case: Case) -> None:
    """After sets that evicted others, the newest pages are not gone while the oldest are all there."""
    small = _evicting_store(case)
    taken = _set_one_by_one(small, _TIMES_FULL * small.pages)
    present = _present(small, taken)
    count = max(_GROUP, small.pages // 4)
    oldest, newest = taken[:count], taken[-count:]
    if len(taken) < small.pages or len(present) == len(taken):
        raise NotVerified(f"nothing was evicted: {len(taken)} pages were taken and kept")
    if present.issuperset(oldest) and len(present.intersection(newest)) <= _FEW_SHARE * count:
        raise small.probe.violation(
            f"the store evicts the pages that were set last: of {len(taken)} pages that were set"
            " one after the other, the first are all there",
            expected=f"the last {count} pages, rather than the first {count}",
            got=f"{len(present.intersection(newest))} of the last {count}, and all of the first",
        )


@check("KV-309")
def what_was_just_read_is_not_evicted_first(case: Case) -> None:
    """While other sets evict pages, those that are read all the time do not go before the others."""
    violation = _of_pages_in_use(case)
    if violation is not None:  # a random choice may look like this once
        violation = _of_pages_in_use(case)
    if violation is not None:
        raise violation


def _of_pages_in_use(case: Case) -> Violation | None:
    """Read every second page of a full store, and set others. Return a violation if the read ones go."""
    small = _evicting_store(case)
    pages = _set_one_by_one(small, small.pages - 1)
    present = [one for one in pages if one in _present(small, pages)]
    used, unused = present[::2], present[1::2]
    if len(unused) < _GROUP:
        raise NotVerified(f"the small store keeps {len(present)} pages only")
    for _ in range(small.pages):
        small.probe.get(small.space, used)
        _set_one_by_one(small, 1)
        left_used, left_unused = _present(small, used), _present(small, unused)
        if len(left_unused) < len(unused):
            return None
        if not left_used:
            return small.probe.violation(
                "the store evicts the pages that were just read, and keeps those that nobody reads",
                expected=f"some of the {len(used)} pages that were read before each set",
                got=f"none of them, and all {len(unused)} others of the same age",
            )
    if len(left_used) == len(used):
        raise NotVerified(f"nothing was evicted: {small.pages} more pages had room")
    return None


def _evicting_store(case: Case) -> SmallStore:
    if case.keeps:
        raise NotDeclared("the store claims UNTIL_DELETED, so it evicts nothing")
    small = small_store(case)
    if small.pages < 2 * _GROUP + 1:
        raise NotVerified(f"the small store has room for {small.pages} pages only")
    return small


def _set_one_by_one(small: SmallStore, count: int) -> list[str]:
    """Offer pages alone, from the oldest to the newest. Return those that the store accepted."""
    pages = small.case.contents(small.space, small.case.hashes(count))
    return [
        page_hash
        for page_hash, data in pages.items()
        if small.probe.set(small.space, {page_hash: data}) == [True]
    ]


def _present(small: SmallStore, hashes: list[str]) -> set[str]:
    seen = small.probe.exists(small.space, hashes) if hashes else []
    return {page_hash for page_hash, there in zip(hashes, seen, strict=True) if there}
