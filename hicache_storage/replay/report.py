"""Count the figures of a replay, and report them as JSON with stable names, for one rank or for all."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import HiCacheError
from hicache_storage.page_store.counters import pages_counter
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_DROPPED = "dropped"


@dataclass(slots=True)
class TierCounts:
    """The number of blocks or pages that were found in each tier."""

    l2: int = 0
    l3: int = 0
    miss: int = 0

    @property
    def total(self) -> int:
        """The sum over all tiers and the misses."""
        return self.l2 + self.l3 + self.miss

    def figures(self, unit: int = 1) -> dict[str, Any]:
        """Return the counts multiplied by `unit`, and the hit rate."""
        return {
            "total": self.total * unit,
            "l2_hits": self.l2 * unit,
            "l3_hits": self.l3 * unit,
            "misses": self.miss * unit,
            "hit_rate": ratio(self.l2 + self.l3, self.total),
        }


@dataclass(slots=True)
class RequestCounts:
    """Totals over the requests of a run."""

    requests: int = 0
    blocks: TierCounts = field(default_factory=TierCounts)
    """A block is a hit if all of its pages are hits. It is an L3 hit if any page came from L3."""
    pages: TierCounts = field(default_factory=TierCounts)
    ideal_block_hits: int = 0
    paired_pages: int = 0
    """The found pages whose bytes were right in every pool, target and draft."""
    corrupt_pages: int = 0
    """Pages whose bytes are not those written, counted separately in each pool."""
    verified_nbytes: int = 0
    unreserved_pages: int = 0
    """Computed pages for which L2 had no slot."""
    prefetch_s: list[float] = field(default_factory=list[float])
    """How many seconds each prefetch took, from its call to its lease."""

    def add_prompt(
        self, pages: int, found: int, loaded: Sequence[int], pages_per_block: int
    ) -> None:
        """Count a prompt of `pages`. `found` of them were usable, and `loaded` came from L3."""
        self.requests += 1
        self.pages.l2 += found - len(loaded)
        self.pages.l3 += len(loaded)
        self.pages.miss += pages - found
        found_blocks = found // pages_per_block
        from_l3 = len({page // pages_per_block for page in loaded} & set(range(found_blocks)))
        self.blocks.l2 += found_blocks - from_l3
        self.blocks.l3 += from_l3
        self.blocks.miss += pages // pages_per_block - found_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Bytes moved in one direction between L2 and L3, including checksums."""

    nbytes: int
    busy_s: float
    """How long at least one call was running."""

    def figures(self) -> dict[str, Any]:
        """Return the fields, and the bandwidth while busy. It is null if nothing was moved."""
        rate = self.nbytes / self.busy_s / 1e9 if self.nbytes and self.busy_s else None
        return {**asdict(self), "gb_per_s": rate}


def figures(
    counts: RequestCounts,
    *,
    page_tokens: int,
    read: Throughput,
    write: Throughput,
    controller: Mapping[str, int],
    store: Mapping[str, int],
    storage: Mapping[str, int],
    unsaved: Sequence[Mapping[str, int]] = (),
    drained: bool = True,
) -> dict[str, Any]:
    """Return everything that was counted, ready for JSON. Names are stable."""
    blocks = counts.blocks.figures()
    ideal = {
        "ideal_hits": counts.ideal_block_hits,
        "ideal_hit_rate": ratio(counts.ideal_block_hits, counts.blocks.total),
    }
    return {
        "requests": counts.requests,
        "blocks": {**blocks, **ideal},
        "pages": counts.pages.figures(),
        "tokens": counts.pages.figures(page_tokens),
        "paired_pages": counts.paired_pages,
        "l3_read": read.figures(),
        "l3_write": write.figures(),
        "prefetch": {
            "p50_s": percentile(counts.prefetch_s, 50),
            "p99_s": percentile(counts.prefetch_s, 99),
        },
        "loaded_unused_pages": controller.get("loaded_unused_pages", 0),
        "dropped_write_pages": controller.get("dropped_pages", 0),
        "unsaved_pages": unsaved_pages(controller.get("dropped_pages", 0), unsaved),
        "drained": drained,
        "unreserved_pages": counts.unreserved_pages,
        "verified_nbytes": counts.verified_nbytes,
        "corrupt_pages": counts.corrupt_pages,
        "controller": dict(sorted(controller.items())),
        "store": dict(sorted(store.items())),
        "storage": dict(sorted(storage.items())),
    }


def unsaved_pages(dropped: int, unsaved: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return how many pages could not be written, by reason and in `total`.

    A page counts once for all pools together. If its write fails twice, it counts twice.
    """
    counts: Counter[str] = Counter()
    for each in unsaved:
        counts.update(each)
    counts[_DROPPED] += dropped
    by_reason = {reason: pages for reason, pages in sorted(counts.items()) if pages}
    return {"total": sum(by_reason.values()), **by_reason}


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Return the smallest of `values` that `percent` % of them do not exceed. None without values."""
    if not values:
        return None
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[rank - 1]


def ratio(part: int, total: int) -> float:
    """Return `part / total`, or 0.0 if `total` is 0."""
    return part / total if total else 0.0


# --- several ranks ---------------------------------------------------------------------------------

_HIT_FIGURES = ("requests", "blocks", "pages", "tokens")
_SUMMED = (
    *("loaded_unused_pages", "dropped_write_pages", "unreserved_pages"),
    *("verified_nbytes", "corrupt_pages"),
)
_LATENCIES = ("p50_s", "p99_s")
_COUNTERS = ("controller", "store", "storage")


def combine_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one report for all ranks, given in the order of their numbers.

    All ranks found the same pages. The hits by tier are taken from the rank that loaded most from L3.

    Raises:
        HiCacheError: The ranks used prefixes of different lengths, which is a bug.
    """
    found = [rank["pages"]["l2_hits"] + rank["pages"]["l3_hits"] for rank in ranks]
    if len(set(found)) > 1:
        raise HiCacheError(f"the ranks used prefixes of different lengths: {found} pages in all")
    most_loaded = max(ranks, key=lambda rank: rank["pages"]["l3_hits"])
    return {
        **ranks[0],
        **{name: most_loaded[name] for name in _HIT_FIGURES},
        **{name: sum(rank[name] for rank in ranks) for name in _SUMMED},
        **{name: _sum_counters(rank[name] for rank in ranks) for name in _COUNTERS},
        "elapsed_s": max(rank["elapsed_s"] for rank in ranks),
        "paired_pages": min(rank["paired_pages"] for rank in ranks),
        "l3_read": _combine_throughputs(rank["l3_read"] for rank in ranks),
        "l3_write": _combine_throughputs(rank["l3_write"] for rank in ranks),
        "prefetch": {
            name: _slowest(rank["prefetch"][name] for rank in ranks) for name in _LATENCIES
        },
        "unsaved_pages": unsaved_pages(0, [_reasons(rank["unsaved_pages"]) for rank in ranks]),
        "drained": all(rank["drained"] for rank in ranks),
        "left_pages": _sum_known(rank["left_pages"] for rank in ranks),
        "pools": [
            _combine_pool(pools) for pools in zip(*(rank["pools"] for rank in ranks), strict=True)
        ],
        "faults": _combine_faults([rank["faults"] for rank in ranks]),
        "swap": _combine_swaps([rank["swap"] for rank in ranks]),
        "ranks": {
            "size": len(ranks),
            "written_pages": [
                _store_counter(pages_counter("save", Verdict.OK), rank) for rank in ranks
            ],
            "loaded_pages": [
                _store_counter(pages_counter("load", Verdict.OK), rank) for rank in ranks
            ],
        },
    }


def _reasons(unsaved: Mapping[str, int]) -> dict[str, int]:
    return {reason: pages for reason, pages in unsaved.items() if reason != "total"}


def _store_counter(name: str, rank: Mapping[str, Any]) -> int:
    """Return a counter of a rank's page store. After a swap, add the second store's counter."""
    stores = [rank["store"], *([rank["swap"]["store"]] if rank["swap"] else [])]
    return sum(store.get(name, 0) for store in stores)


def _combine_pool(pools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first rank's pool, with the key spaces of all ranks."""
    spaces = dict.fromkeys(space for pool in pools for space in pool["spaces"])
    return {**pools[0], "spaces": list(spaces)}


def _sum_counters(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counters:
        total.update(each)
    return dict(sorted(total.items()))


def _combine_throughputs(throughputs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all bytes over the longest time, because ranks move their pages at the same time."""
    each = list(throughputs)
    nbytes = sum(one["nbytes"] for one in each)
    return Throughput(nbytes=nbytes, busy_s=max(one["busy_s"] for one in each)).figures()


def _sum_known(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _slowest(times_s: Iterable[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)


def _combine_faults(faults: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    present = [each for each in faults if each is not None]
    if not present:
        return None
    return {
        "plan": present[0]["plan"],
        "struck": _sum_counters(each["struck"] for each in present),
    }


def _combine_swaps(swaps: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    present = [each for each in swaps if each is not None]
    if not present:
        return None
    return {
        **present[0],
        **{name: all(each[name] for each in present) for name in ("begun", "drained", "attached")},
        "complaint": next((each["complaint"] for each in present if each["complaint"]), None),
        "took_s": _slowest(each["took_s"] for each in present),
        "store": _sum_counters(each["store"] for each in present),
        "storage": _sum_counters(each["storage"] for each in present),
    }
