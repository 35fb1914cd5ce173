"""The figures of several ranks in one report: what they did is added up, what they found is agreed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.counters import pages_counter
from hicache_storage.page_store.results import Verdict
from hicache_storage.replay.report import Flow, unsaved_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_FOUND = ("requests", "blocks", "pages", "tokens")
_ADDED = (
    *("loaded_unused_pages", "dropped_write_pages", "unreserved_pages"),
    *("verified_nbytes", "corrupt_pages"),
)
_TIMES = ("p50_s", "p99_s")
_COUNTERS = ("controller", "store", "storage")


def combined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report of all ranks, in the order of the ranks.

    What was found is the same on all of them. Where it was found is told by the rank that loaded most.

    Raises:
        HiCacheError: They found different prefixes, which they must not.
    """
    found = [part["pages"]["l2_hits"] + part["pages"]["l3_hits"] for part in parts]
    if len(set(found)) > 1:
        raise HiCacheError(f"the ranks used prefixes of different lengths: {found} pages in all")
    furthest = max(parts, key=lambda part: part["pages"]["l3_hits"])
    return {
        **parts[0],
        **{name: furthest[name] for name in _FOUND},
        **{name: sum(part[name] for part in parts) for name in _ADDED},
        **{name: _added(part[name] for part in parts) for name in _COUNTERS},
        "elapsed_s": max(part["elapsed_s"] for part in parts),
        "paired_pages": min(part["paired_pages"] for part in parts),
        "l3_read": _flow(part["l3_read"] for part in parts),
        "l3_write": _flow(part["l3_write"] for part in parts),
        "prefetch": {name: _slowest(part["prefetch"][name] for part in parts) for name in _TIMES},
        "unsaved_pages": unsaved_pages(0, [_reasons(part["unsaved_pages"]) for part in parts]),
        "drained": all(part["drained"] for part in parts),
        "pools": [_pool(each) for each in zip(*(part["pools"] for part in parts), strict=True)],
        "faults": _faults([part["faults"] for part in parts]),
        "swap": _swap([part["swap"] for part in parts]),
        "ranks": {
            "size": len(parts),
            "written_pages": [_moved(pages_counter("save", Verdict.OK), part) for part in parts],
            "loaded_pages": [_moved(pages_counter("load", Verdict.OK), part) for part in parts],
        },
    }


def _reasons(unsaved: Mapping[str, int]) -> dict[str, int]:
    return {reason: pages for reason, pages in unsaved.items() if reason != "total"}


def _moved(counter: str, part: Mapping[str, Any]) -> int:
    """Return a counter of a rank's page store, and of the next one's where there was one."""
    stores = [part["store"], *([part["swap"]["store"]] if part["swap"] else [])]
    return sum(store.get(counter, 0) for store in stores)


def _pool(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the pool as the first rank has it, with the key spaces of all ranks."""
    spaces = dict.fromkeys(space for part in parts for space in part["spaces"])
    return {**parts[0], "spaces": list(spaces)}


def _added(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return dict(sorted(total.items()))


def _flow(flows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Ranks move their pages at the same time: the longest of them is how long it took."""
    each = list(flows)
    nbytes = sum(flow["nbytes"] for flow in each)
    return Flow(nbytes=nbytes, busy_s=max(flow["busy_s"] for flow in each)).figures()


def _slowest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


def _faults(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    told = [part for part in parts if part is not None]
    if not told:
        return None
    return {"plan": told[0]["plan"], "struck": _added(part["struck"] for part in told)}


def _swap(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    told = [part for part in parts if part is not None]
    if not told:
        return None
    return {
        **told[0],
        **{name: all(part[name] for part in told) for name in ("begun", "drained", "attached")},
        "complaint": next((part["complaint"] for part in told if part["complaint"]), None),
        "took_s": _slowest(part["took_s"] for part in told),
        "store": _added(part["store"] for part in told),
        "storage": _added(part["storage"] for part in told),
    }
