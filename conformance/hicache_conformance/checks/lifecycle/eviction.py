"""KV-309: a store that evicts does not begin with the pages that were just set or read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.scenarios.small_stores import SmallStore, small_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.run.outcomes import Violation

_TIMES_FULL = 2
"""How often a check fills a store that keeps its first pages."""
_GROUP = 4
"""The least pages of a group. Chance does not keep one group whole and evict the whole other."""
_FEW_SHARE = 0.25
"""A group of which no more than this part is left counts as gone."""


@check("KV-309")
def what_was_just_set_is_not_evicted_first(case: Case) -> None:
    """While sets evict pages, the newest pages do not go before all of the oldest."""
    _must_pass(case, _of_new_pages)


@check("KV-309")
def what_was_just_read_is_not_evicted_first(case: Case) -> None:
    """While other sets evict pages, those that are read all the time do not go before the others."""
    _must_pass(case, _of_pages_in_use)


def _must_pass(case: Case, trial: Callable[[Case], Violation | None]) -> None:
    """Raise if two trials fail: a random choice may fail one."""
    violation = trial(case) and trial(case)
    if violation is not None:
        raise violation


def _of_new_pages(case: Case) -> Violation | None:
    """Set pages until half of the first ones are gone. Return a violation if the older half is whole."""
    small = _evicting_store(case)
    first = _set_one_by_one(small, small.pages)
    first = [one for one in first if one in _present(small, first)]
    later: list[str] = []
    gone = 0
    while gone < len(first) // 2 and len(later) < _TIMES_FULL * small.pages:
        taken = _set_one_by_one(small, 1)
        if not taken:
            raise NotVerified(f"the store refuses pages: {len(first) + len(later)} were taken")
        later += taken
        gone = len(first) - len(_present(small, first))
    oldest = first[: len(first) // 2]
    newest = [*first, *later][-max(_GROUP, small.pages // 4) :]
    left_oldest, left_newest = _present(small, oldest), _present(small, newest)
    if len(oldest) < _GROUP or len(left_oldest) < len(oldest):
        return None
    if gone < len(first) // 2 and len(left_newest) > _FEW_SHARE * len(newest):
        raise NotVerified(f"nothing was evicted: {len(first) + len(later)} pages were taken")
    small.probe.delete(small.space, [*first, *later])  # the next trial begins with an empty store
    return small.probe.violation(
        f"the store evicts the newest pages first: of {len(first) + len(later)} pages that were set"
        " one after the other, the oldest are all there",
        expected="the pages that were set last, rather than the first ones",
        got=f"all of the first {len(oldest)}, {len(left_newest)} of the last {len(newest)}, and"
        f" {len(first) - gone} of the first {len(first)}",
    )


def _of_pages_in_use(case: Case) -> Violation | None:
    """Read every second page of a full store, and set others. Return a violation if the read ones go."""
    small = _evicting_store(case)
    pages = _set_one_by_one(small, small.pages - 1)
    present = [one for one in pages if one in _present(small, pages)]
    used, unused = present[::2], present[1::2]
    if len(unused) < _GROUP:
        raise NotVerified(f"the small store keeps {len(present)} pages only")
    later: list[str] = []
    left_used = set(used)
    for _ in range(small.pages):
        small.probe.get(small.space, used)
        later += _set_one_by_one(small, 1)
        left_used, left_unused = _present(small, used), _present(small, unused)
        if len(left_unused) < len(unused):
            return None
        if not left_used:
            small.probe.delete(small.space, [*pages, *later])
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
