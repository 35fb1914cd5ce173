"""Make a plan: the figures of a trace for every size of L2 and L3, ready for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_storage.planning.accesses import Accesses
from hicache_storage.planning.demand import Arrivals
from hicache_storage.planning.money import savings
from hicache_storage.planning.stack_distances import NEVER
from hicache_storage.planning.tiers import HostTier, StorageTier
from hicache_storage.replay.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.planning.settings import PlanSettings
    from hicache_storage.planning.stack_distances import Integers, Mask
    from hicache_storage.replay.models import PoolShape
    from hicache_storage.replay.trace import Request

_PARTS = 8
"""How many parts a sample is split into. Their spread gives the sample's error."""
_CURVE_POINTS = 96
_95_PERCENT = 1.96
_SHARES_OF_IDEAL = (0.5, 0.9, 0.99)


def make_plan(requests: Sequence[Request], settings: PlanSettings) -> dict[str, Any]:
    """Return the plan for a trace with at least one request. The field names are stable."""
    return _Planner.of(requests, settings).figures()


@dataclass(frozen=True, slots=True)
class _Planner:
    settings: PlanSettings
    arrivals: Arrivals
    total_blocks: int
    longest_blocks: int
    host: HostTier
    parts: list[HostTier]
    """The parts of a sample. Empty if every block is analyzed."""
    given_storage: bool
    """True if the user gave the sizes of L3."""

    @classmethod
    def of(cls, requests: Sequence[Request], settings: PlanSettings) -> _Planner:
        accesses = Accesses.of(requests)
        total = len(accesses)
        most = settings.max_pages / settings.pages_per_block
        parts: list[Accesses] = []
        if total > most:
            accesses = accesses.sampled(most / total)
            parts = accesses.parts(_PARTS)
        longest = max(len(request.blocks) for request in requests)
        host = HostTier.of(accesses)
        planner = cls(
            settings,
            Arrivals.of(requests),
            total,
            longest,
            host,
            [HostTier.of(part) for part in parts],
            bool(settings.storage_sizes),
        )
        return replace(planner, settings=planner.with_default_sizes())

    def with_default_sizes(self) -> PlanSettings:
        """Return the settings, with sizes that fit the trace if none are given."""
        settings, footprint = self.settings, self.distinct_nbytes
        least = (
            self.longest_blocks * settings.pages_per_block * settings.page_nbytes(settings.pools)
        )
        hosts = {_power_of_two(max(footprint / share, least)) for share in (64, 16, 4)}
        storages = {_power_of_two(footprint / share) for share in (8, 2, 1)}
        return replace(
            settings,
            host_sizes=settings.host_sizes or tuple(sorted(hosts)),
            storage_sizes=settings.storage_sizes or (0, *sorted(storages)),
        )

    @property
    def distinct_blocks(self) -> float:
        """The number of distinct blocks in the trace."""
        blocks = self.host.accesses.blocks
        return (int(blocks.max()) + 1 if len(blocks) else 0) / self.host.accesses.rate

    @property
    def distinct_nbytes(self) -> int:
        """The bytes of all distinct pages, as L3 stores them."""
        settings = self.settings
        pages = self.distinct_blocks * settings.pages_per_block
        return round(pages * settings.stored_nbytes(settings.pools))

    # --- figures ---------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return the whole plan, ready for JSON."""
        settings = self.settings
        tiers = {size: self._storage_tier(self.host, size) for size in settings.host_sizes}
        options = self._options(tiers)
        rate = self.host.accesses.rate
        return {
            "requests": len(self.arrivals.times_s),
            "duration_s": self.arrivals.duration_s,
            "model": settings.model,
            "page_tokens": settings.page_tokens,
            "write_policy": settings.write_policy.value,
            "blocks": {
                "total": self.total_blocks,
                "distinct": round(self.distinct_blocks),
                "longest_prompt": self.longest_blocks,
            },
            "distinct_nbytes": self.distinct_nbytes,
            "sample": None
            if not self.parts
            else {"rate": rate, "blocks": len(self.host.accesses), "parts": len(self.parts)},
            "pools": [self._pool(pool) for pool in settings.pools],
            "ideal_hit_rate": self._share(self.host.needs_alone < NEVER, self.host),
            "l2_for_share_of_ideal": self._sizes_for_shares(),
            "l2_curve": self._host_curve(),
            "l3_curves": [self._storage_curve(size, tier) for size, tier in tiers.items()],
            "options": options,
            "best": _best(options),
            "notes": self._notes(),
            **({"tiers": self._tier_shares(options)} if settings.tiers else {}),
        }

    def _pool(self, pool: PoolShape) -> dict[str, Any]:
        stored = self.settings.stored_nbytes([pool])
        pages = self.distinct_blocks * self.settings.pages_per_block
        return {
            "name": pool.name,
            "shape": str(pool.shape),
            "page_nbytes": self.settings.page_nbytes([pool]),
            "distinct_nbytes": round(pages * stored),
        }

    def _share(self, hits: Mask, tier: HostTier, *, first: bool = True) -> float:
        """Return the share of accesses that hit.

        By chance a sample has more or fewer accesses than its rate predicts. The difference comes from
        blocks that are used all the time, so it counts as hits, but only of the `first` tier
        (SHARDS-adj).
        """
        accesses = tier.accesses
        missing = accesses.expected - len(accesses) if first else 0.0
        return float(np.count_nonzero(hits) + missing) / accesses.expected

    def _storage_tier(
        self, tier: HostTier, nbytes: int, pools: Sequence[PoolShape] | None = None
    ) -> StorageTier:
        blocks = self.settings.host_blocks(nbytes, pools) * tier.accesses.rate
        return StorageTier.of(tier, blocks, self.settings.write_policy)

    # --- options ---------------------------------------------------------------------------------------

    def _options(self, tiers: Mapping[int, StorageTier]) -> list[dict[str, Any]]:
        options: list[dict[str, Any]] = []
        target = self.settings.pools[:1]
        for host_size, tier in tiers.items():
            parts = [self._storage_tier(part, host_size) for part in self.parts]
            alone = (
                self._storage_tier(self.host, host_size, target)
                if len(self.settings.pools) > 1
                else None
            )
            for size in self._storage_sizes(host_size):
                option = self._option(host_size, size, tier)
                option["error"] = self._error(size, parts)
                if alone is not None:
                    option["target_alone"] = self._shares(size, alone, self.host, target)
                options.append(option)
        return options

    def _tier_shares(self, options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return for each L2 and each tier of L3 the share of accesses that the tier serves.

        A tier holds what an L3 of its size alone would hold, because it is written and read with
        the others. A block behind a gap in a tier counts for the tier that has the gap's blocks,
        so the share of a fast tier is a lower bound.
        """
        found = {(one["host_nbytes"], one["storage_nbytes"]): one for one in options}
        rows: list[dict[str, Any]] = []
        for host_size in self.settings.host_sizes:
            so_far: list[float] = []
            for name, nbytes in self.settings.tiers:
                option = found[host_size, nbytes]
                so_far = so_far or [option["l2_hit_rate"]]
                so_far.append(option["hit_rate"])
                rows.append(
                    {
                        "host_nbytes": host_size,
                        "name": name,
                        "nbytes": nbytes,
                        "hit_rate": so_far[-1] - so_far[-2],
                        "hit_rate_so_far": so_far[-1],
                    }
                )
        return rows

    def _storage_sizes(self, host_size: int) -> list[int]:
        """Return the sizes of L3 to compare behind an L2.

        Default sizes up to the L2's are left out, because an L3 that small has almost no hits.
        """
        sizes = self.settings.storage_sizes
        return [size for size in sizes if self.given_storage or not 0 < size <= host_size]

    def _option(self, host_size: int, size: int, tier: StorageTier) -> dict[str, Any]:
        settings, rate = self.settings, self.host.accesses.rate
        blocks = settings.storage_blocks(size) * rate
        block_nbytes = settings.pages_per_block * settings.stored_nbytes(settings.pools)
        requests = self.host.accesses.requests
        shares = self._shares(size, tier, self.host, settings.pools)
        reads = requests[tier.reads(blocks)]
        writes = requests[tier.written_at[tier.writes(blocks)]] if size else reads[:0]
        unread = np.count_nonzero(tier.unread(blocks)) if size else 0
        saved_tokens = shares["hit_rate"] * self.total_blocks * BLOCK_TOKENS
        return {
            "host_nbytes": host_size,
            "storage_nbytes": size,
            **shares,
            "l3_read": self._pools_of(self.arrivals.figures(reads, block_nbytes / rate)),
            "l3_write": self._pools_of(self.arrivals.figures(writes, block_nbytes / rate)),
            "written_pages": round(len(writes) / rate) * settings.pages_per_block,
            "unread_pages": round(int(unread) / rate) * settings.pages_per_block,
            "saved_tokens": round(saved_tokens),
            "read_series": self.arrivals.series(reads, block_nbytes / rate),
            "write_series": self.arrivals.series(writes, block_nbytes / rate),
            **savings(
                settings.prices,
                saved_tokens=saved_tokens,
                duration_s=self.arrivals.duration_s,
                host_nbytes=host_size,
                storage_nbytes=size,
            ),
        }

    def _pools_of(self, figures: dict[str, float]) -> dict[str, Any]:
        """Add the bytes of each pool to the figures."""
        stored = self.settings.stored_nbytes(self.settings.pools)
        return {
            **figures,
            "pools": {
                pool.name: figures["nbytes"] * self.settings.stored_nbytes([pool]) / stored
                for pool in self.settings.pools
            },
        }

    def _shares(
        self, size: int, tier: StorageTier, host: HostTier, pools: Sequence[PoolShape]
    ) -> dict[str, float]:
        """Return the shares of accesses that L2 and L3 hit."""
        blocks = self.settings.storage_blocks(size, pools) * host.accesses.rate
        hits = tier.hits(blocks)
        l2 = self._share(hits & tier.in_host, host)
        l3 = self._share(hits & ~tier.in_host, host, first=False)
        return {"l2_hit_rate": l2, "l3_hit_rate": l3, "hit_rate": l2 + l3}

    def _error(self, size: int, parts: Sequence[StorageTier]) -> float | None:
        """Return the half width of the hit rate's 95 % interval. None if every block is analyzed."""
        if not parts:
            return None
        rates = [
            self._shares(size, part, host, self.settings.pools)["hit_rate"]
            for part, host in zip(parts, self.parts, strict=True)
        ]
        return float(_95_PERCENT * np.std(rates, ddof=1) / math.sqrt(len(rates)))

    # --- curves ----------------------------------------------------------------------------------------

    def _sizes_for_shares(self) -> dict[str, int | None]:
        """Return how many bytes of L2 reach each share of the ideal hits (`_SHARES_OF_IDEAL`) alone."""
        needs = np.sort(self.host.needs_alone[self.host.needs_alone < NEVER])
        settings = self.settings
        block_nbytes = settings.pages_per_block * settings.page_nbytes(settings.pools)
        return {
            f"{share:g}": round(
                int(needs[math.ceil(share * len(needs)) - 1])
                / self.host.accesses.rate
                * block_nbytes
            )
            if len(needs)
            else None
            for share in _SHARES_OF_IDEAL
        }

    def _host_curve(self) -> list[list[float]]:
        settings = self.settings
        page = settings.page_nbytes(settings.pools)
        return self._curve(self.host.needs_alone, page, settings.pages_per_block * page)

    def _storage_curve(self, host_size: int, tier: StorageTier) -> dict[str, Any]:
        settings = self.settings
        stored = settings.stored_nbytes(settings.pools)
        return {
            "host_nbytes": host_size,
            "points": self._curve(tier.needs, stored, settings.pages_per_block * stored),
        }

    def _curve(self, needs: Integers, least: int, block_nbytes: int) -> list[list[float]]:
        """Return (bytes, hit rate) for capacities from one page up to all of the trace's blocks."""
        accesses = self.host.accesses
        ordered = np.sort(needs)
        most = max(self.distinct_nbytes, 2 * least)
        sizes = np.geomspace(max(least, most / 4096), most, _CURVE_POINTS)
        counts = np.searchsorted(ordered, sizes / block_nbytes * accesses.rate, side="right")
        missing = accesses.expected - len(accesses)
        return [
            [float(round(size)), (int(count) + missing) / accesses.expected]
            for size, count in zip(sizes, counts, strict=True)
        ]

    def _notes(self) -> list[str]:
        """Return warnings about the figures, for example that they come from a sample."""
        notes: list[str] = []
        settings = self.settings
        too_small = [
            size for size in settings.host_sizes if settings.host_blocks(size) < self.longest_blocks
        ]
        if too_small:
            notes.append(
                f"the longest prompt has {self.longest_blocks:,} blocks, but the smallest L2"
                f" holds {settings.host_blocks(min(too_small)):,}: such a prompt hits less than"
                " the plan says"
            )
        if self.parts:
            notes.append(
                f"only {100 * self.host.accesses.rate:.1f} % of the blocks were analyzed, so"
                " bandwidths over 1 s are rough"
            )
        return notes


def _best(options: Sequence[dict[str, Any]]) -> int | None:
    """Return the number of the option with the largest net value. None if no value is known."""
    known = [number for number, option in enumerate(options) if option["net_per_month"] is not None]
    return max(known, key=lambda number: options[number]["net_per_month"], default=None)


def _power_of_two(nbytes: float) -> int:
    """Return the smallest power of two that is at least `nbytes`."""
    return 1 << max(0, math.ceil(nbytes) - 1).bit_length()
