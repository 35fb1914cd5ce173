"""KV-204: round trips, which the kit counts, grow with the batches and not with their pages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.fault_path import FaultPath, open_fault_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe

_PAGE_NBYTES = 64
_MAX_BATCH = 256
"""The largest batch that is tried, because larger ones show nothing new."""
_FREE = 8
"""How many round trips a batch may add: for several servers, an index, or a growing pool."""
_BATCHES = 16
_FREE_A_BATCH = 2
_PAGES_A_TRIP = 16
"""How many pages one round trip carries: replies may come in parts, and requests may be split."""


@check("KV-204")
def round_trips_do_not_grow_with_the_pages_of_a_batch(case: Case) -> None:
    """A full batch takes about as many round trips as a batch of one page."""
    with open_fault_path(case, _PAGE_NBYTES, short_timeout=False) as path:
        before = sum(proxy.connections for proxy in path.proxies)
        probe = path.caller().probe
        count = min(probe.most_pages(path.space), _MAX_BATCH)
        for operation, (one, many) in _turns(path, probe, (1, count)).items():
            connections = sum(proxy.connections for proxy in path.proxies) - before
            side = max(1, min(probe.storage.capabilities.parallelism, connections))
            allowed = one + _FREE + count // _PAGES_A_TRIP
            case.evidence[f"round trips of {operation}"] = f"{one} for 1 page, {many} for {count}"
            if many / side > allowed:
                raise probe.violation(
                    f"{operation} of {count} pages takes {many} round trips: they grow with the pages",
                    expected=f"about as many as for one page, which took {one}; {allowed} would do",
                    got=f"{many}, over {side} connection{'s' * (side > 1)}",
                    sequence=[f"store.{operation}(space, [{count} hashes])"],
                )


@check("KV-204", quick=False)
def round_trips_grow_with_the_batches(case: Case) -> None:
    """Sixteen full batches take about sixteen times the round trips of one."""
    with open_fault_path(case, _PAGE_NBYTES, short_timeout=False) as path:
        probe = path.caller().probe
        count = min(probe.most_pages(path.space), _MAX_BATCH)
        one, many = (
            min(_turns_of(path, partial(_exists, path, probe, pages)) for _ in range(2))
            for pages in (count, _BATCHES * count)
        )
        allowed = _BATCHES * (one + _FREE_A_BATCH)
        if many > allowed:
            raise probe.violation(
                f"batch_exists of {_BATCHES * count} pages takes {many} round trips, of {count} pages"
                f" {one}: they grow faster than the batches",
                expected=f"up to {allowed}",
                got=str(many),
            )


def _exists(path: FaultPath, probe: Probe, count: int) -> None:
    probe.exists(path.space, path.case.hashes(count))


def _turns(path: FaultPath, probe: Probe, counts: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Return each operation's round trips for each number of pages: the fewest of three tries."""
    found: dict[str, list[int]] = {}
    for count in counts:
        tries = [_turns_once(path, probe, count) for _ in range(3)]
        for operation in tries[0]:
            found.setdefault(operation, []).append(min(one[operation] for one in tries))
    return {operation: (few, many) for operation, (few, many) in found.items()}


def _turns_once(path: FaultPath, probe: Probe, count: int) -> dict[str, int]:
    pages = path.case.contents(path.space, path.case.hashes(count))
    hashes = list(pages)
    calls: dict[str, Callable[[], object]] = {
        "batch_exists": partial(probe.exists, path.space, hashes),
        "batch_set": partial(probe.set, path.space, pages),
        "batch_get": partial(probe.get, path.space, hashes),
        "batch_delete": partial(probe.delete, path.space, hashes),
    }
    return {operation: _turns_of(path, call) for operation, call in calls.items()}


def _turns_of(path: FaultPath, call: Callable[[], object]) -> int:
    before = sum(proxy.turns for proxy in path.proxies)
    call()
    return sum(proxy.turns for proxy in path.proxies) - before
