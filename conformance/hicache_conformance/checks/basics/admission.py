"""KV-009: a store accepts pages while it has room, and counts the pages that it refuses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.setup import fitting, nothing_refused
from hicache_conformance.scenarios.small_stores import small_store
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe

_SETS = 1000
_PAGE_NBYTES = 1024
_BATCHES = (1, 1, 1, 7, 40)
"""How many pages successive calls set: one alone, then batches of several sizes."""
_MOST_AT_ONCE = 100
"""After this many pages all are deleted, so that the store stays almost empty."""
_LEAST_REFUSED = 8


@check("KV-009")
def an_empty_store_refuses_no_page(case: Case) -> None:
    """An idle, empty store accepts each of 1,000 sets, unless its retention is BEST_EFFORT."""
    store = case.open()
    space = case.space(_page_nbytes(case, store))
    store.open_space(space)
    taken: dict[str, bytes] = {}
    offered = refused = 0
    for count in _batches(store.most_pages(space)):
        pages = case.contents(space, case.hashes(count))
        answers = store.set_once(space, pages)
        offered += count
        refused += answers.count(False)
        taken.update(item for item, ok in zip(pages.items(), answers, strict=True) if ok)
        if refused and case.claims.retention is not Retention.BEST_EFFORT:
            first = list(pages)[answers.index(False)][:8]
            raise store.violation(
                f"an idle, empty store refused page {offered}, which has"
                f" {space.stored_nbytes} bytes",
                expected=f"True: there were {len(taken)} pages in the store, and nothing was wrong",
                got=f"False for {first}",
                sequence=case.trace.sequence(first),
            )
        if len(taken) >= _MOST_AT_ONCE:
            case.must_hold(store, space, dict(list(taken.items())[-3:]))
            if "batch_delete" not in case.absent:
                store.delete(space, list(taken))
            taken.clear()
    case.evidence["sets"] = f"{offered}, of which {refused} were refused"


@check("KV-009")
def what_is_refused_is_counted(case: Case) -> None:
    """A full store counts the pages that it refuses in `stats()`, under a name that says why."""
    small = small_store(case)
    small.fill()
    probe, space = small.probe, small.space
    before = dict(probe.storage.stats().counters)
    pages = case.contents(space, case.hashes(2 * _LEAST_REFUSED))
    refused = [one for one, data in pages.items() if probe.set_once(space, {one: data}) == [False]]
    if len(refused) < _LEAST_REFUSED:
        raise nothing_refused(case)
    after = dict(probe.storage.stats().counters)
    # The probe has looked up the refused pages too, so a counter of misses does not count refusals.
    for page_hash in refused:
        probe.exists(space, [page_hash])
        probe.get(space, [page_hash])
    looked = _grown(after, probe.storage.stats().counters)
    grown = {name: count - looked[name] for name, count in _grown(before, after).items()}
    case.evidence["counted"] = ", ".join(f"{name} {n}" for name, n in grown.items() if n) or "-"
    if max(grown.values(), default=0) < len(refused):
        raise probe.violation(
            f"{len(refused)} pages were refused, but no counter of stats() has grown by that number",
            expected="StorageStats(counters={...}) with refusals by reason",
            got=_growth_text(grown),
        )


def _page_nbytes(case: Case, store: Probe) -> int:
    """Return a page size at which all pages that are stored at once have plenty of room."""
    capacity_nbytes = store.storage.stats().capacity_nbytes
    most = capacity_nbytes // (4 * _MOST_AT_ONCE) if capacity_nbytes else _PAGE_NBYTES
    return fitting(case, max(1, min(_PAGE_NBYTES, most)))


def _batches(max_batch: int) -> Iterator[int]:
    """Yield how many pages each call should set, 1,000 pages in all."""
    left = _SETS
    while left:
        for count in _BATCHES:
            step = min(count, left, max_batch)
            left -= step
            if step:
                yield step


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count - before.get(name, 0) for name, count in after.items()})


def _growth_text(grown: Mapping[str, int]) -> str:
    return ", ".join(f"{name} by {count}" for name, count in grown.items()) or "no counters at all"
