"""The controller's settings: when to prefetch, when to write a page to L3, and how much at once.

Names and defaults are SGLang's (sglang/srt/mem_cache/unified_radix_cache.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_storage.durations import check_seconds
from hicache_storage.prefetch_policy import PrefetchPolicy

MIN_END_WAIT_S = 0.1
"""The least time to wait for a call or a thread to end, even after its deadline."""


class WritePolicy(enum.Enum):
    """When a page of L2 is written to L3."""

    WRITE_THROUGH = "write_through"
    """Write a page as soon as it is in L2."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Write a page when it is used a second time."""
    WRITE_BACK = "write_back"
    """Write a page when L2 evicts it."""

    @property
    def uses(self) -> int | None:
        """The number of uses after which a page is written. Its arrival is one. None: at eviction."""
        return {"write_through": 1, "write_through_selective": 2}.get(self.value)


class PartialHits(enum.Enum):
    """What to do if only an optional pool, such as a draft model's, lacks a page."""

    SHORTEN = "shorten"
    """End the prefix before the page, so that the draft model has every token of the prefix."""
    TAKE_TARGET = "take_target"
    """Include the page. The lease names the pages that the draft model must recompute or skip."""


class DropPolicy(enum.Enum):
    """Which pages are dropped when the write queue is full."""

    NEWEST = "newest"
    """The pages that are being added."""
    OLDEST = "oldest"
    """The pages that have waited longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Policies and limits for the transfers between L2 and L3."""

    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_threshold_tokens: int = 256
    """The smallest number of missing tokens that is worth a prefetch from L3."""
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    batch_pages: int = 128
    """The most pages of one load or save. A prefetch can stop between two loads."""
    prefetch_threads: int = 1
    prefetch_capacity: float = 0.5
    """The share of L2 that unfinished prefetches may hold. Beyond it, new prefetches are refused."""
    inflight_nbytes: int | None = None
    """The most bytes that may be in reads that the store has not answered. None: no limit."""
    write_queue_pages: int | None = None
    """The most pages in the write queue. Pages beyond that are dropped. None: as many as L2 holds."""
    drop_policy: DropPolicy = DropPolicy.NEWEST
    partial_hits: PartialHits = PartialHits.SHORTEN
    explained_requests: int = 1000
    """The number of finished requests that `explain` remembers."""

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
            raise ValueError(
                f"prefetch_capacity must be above 0 and at most 1, not {self.prefetch_capacity}"
            )
        if self.prefetch_threshold_tokens < 0:
            raise ValueError(
                f"prefetch_threshold_tokens must be at least 0, not {self.prefetch_threshold_tokens}"
            )
        for name in ("prefetch_timeout_base_s", "prefetch_timeout_per_ki_token_s"):
            check_seconds(name, getattr(self, name), zero=True)

    def max_wait_s(self, pages: int, page_tokens: int) -> float | None:
        """Return how long `result` waits at most for `pages` pages. None: no limit."""
        return self.prefetch_policy.max_wait_s(
            pages * page_tokens,
            base_s=self.prefetch_timeout_base_s,
            per_ki_token_s=self.prefetch_timeout_per_ki_token_s,
        )
