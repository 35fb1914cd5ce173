"""When a prefetch stops waiting, and when a page is written to L3.

Names, defaults and formulas are SGLang's (sglang/srt/mem_cache/unified_radix_cache.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_storage.durations import check_seconds


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its pages; what has arrived by then is used."""

    BEST_EFFORT = "best_effort"
    """Not at all."""
    WAIT_COMPLETE = "wait_complete"
    """Until everything that was found has arrived or failed."""
    TIMEOUT = "timeout"
    """Until it is complete, but no longer than its size justifies."""


class WritePolicy(enum.Enum):
    """When a page of L2 is written to L3."""

    WRITE_THROUGH = "write_through"
    """As soon as it is in L2."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is used a second time."""
    WRITE_BACK = "write_back"
    """When L2 evicts it."""

    @property
    def uses(self) -> int | None:
        """Uses of a page, its arrival included, that make it worth writing; None: its eviction does."""
        return {"write_through": 1, "write_through_selective": 2}.get(self.value)


class PartialHits(enum.Enum):
    """What a page is worth that the required pools have and an optional one lacks: target, no draft."""

    SHORTEN = "shorten"
    """Nothing: the prefix ends in front of it. Drafting loses no token that way."""
    TAKE_TARGET = "take_target"
    """Its target's part: the lease tells which pages the draft must compute again or do without."""


class DropPolicy(enum.Enum):
    """Which pages are not written when the write queue is full."""

    NEWEST = "newest"
    """Those that come."""
    OLDEST = "oldest"
    """Those that have waited longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """How a controller moves pages between L2 and L3."""

    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_threshold_tokens: int = 256
    """Fewer tokens than this are not worth a trip to L3."""
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    batch_pages: int = 128
    """Pages of one load or save; a prefetch can stop between two loads."""
    prefetch_threads: int = 1
    prefetch_capacity: float = 0.5
    """Share of L2 that unfinished prefetches may hold before another one is turned away."""
    inflight_nbytes: int | None = None
    """Bytes of reads that the store may owe at a time; None: no limit."""
    write_queue_pages: int | None = None
    """Pages that may wait to be written; more are dropped. None: as many as L2 has."""
    drop_policy: DropPolicy = DropPolicy.NEWEST
    partial_hits: PartialHits = PartialHits.SHORTEN
    explained_requests: int = 1000
    """Requests for which `explain` knows the answer: the last ones."""

    def __post_init__(self) -> None:
        for name in (
            "batch_pages",
            "prefetch_threads",
            "explained_requests",
            "inflight_nbytes",
            "write_queue_pages",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 < self.prefetch_capacity <= 1:
            raise ValueError(f"prefetch_capacity must be in (0, 1], not {self.prefetch_capacity}")
        if self.prefetch_threshold_tokens < 0:
            raise ValueError(
                f"prefetch_threshold_tokens must be at least 0, not {self.prefetch_threshold_tokens}"
            )
        for name in ("prefetch_timeout_base_s", "prefetch_timeout_per_ki_token_s"):
            check_seconds(name, getattr(self, name), zero=True)

    def patience_s(self, pages: int, page_tokens: int) -> float | None:
        """How long a request waits for `pages` pages from when it first asks; None: to the end."""
        if self.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return None
        if self.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return 0.0
        per_page_s = page_tokens / 1024 * self.prefetch_timeout_per_ki_token_s
        return self.prefetch_timeout_base_s + pages * per_page_s
