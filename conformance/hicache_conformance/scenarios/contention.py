"""Pages that threads write in several versions at once, so large that torn pages are likely."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.scenarios.setup import fitting
from hicache_conformance.tools.processes.threads import run_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_SMALL_NBYTES = 1024


def large_pages(
    case: Case, store: Probe, *, count: int, versions: int, most_nbytes: int = 8 << 20
) -> tuple[KeySpace, dict[str, list[bytes]]]:
    """Return versions of the largest pages that the store accepts, so that writing one takes a while.

    The first version of each page has been set.
    """
    nbytes = fitting(case, most_nbytes)
    while True:
        space = case.space(nbytes)
        store.open_space(space)
        hashes = case.hashes(count)
        contents = [case.contents(space, hashes, version) for version in range(versions)]
        if nbytes <= _SMALL_NBYTES:
            case.must_set(store, space, contents[0])
        if nbytes <= _SMALL_NBYTES or all(store.set(space, contents[0])):
            return space, {h: [each[h] for each in contents] for h in hashes}
        store.delete(space, hashes)
        nbytes //= 4


def run_contended(
    case: Case, bodies: Sequence[Callable[[int], object]], *, turns: int = 1000
) -> None:
    """Run all bodies at once, again and again for a while.

    If a page is set repeatedly, it counts once in the footprint of the check.
    """
    given = len(case.trace.footprint)
    calls = run_at_once(bodies, turns=turns, limit_s=0.7 if case.quick else 2.0)
    del case.trace.footprint[given:]
    case.evidence["rounds"] = str(calls)


def must_be_intact(
    case: Case,
    store: Probe,
    space: KeySpace,
    allowed: Mapping[str, Sequence[bytes]],
    found: Sequence[bytes | None],
) -> int:
    """Raise if a found page has contents that are not allowed. Return how many pages were found."""
    for (page_hash, contents), data in zip(allowed.items(), found, strict=True):
        if data is not None and data not in contents:
            raise case.wrong_bytes(store, space, page_hash, data, contents)
    return len(found) - found.count(None)
