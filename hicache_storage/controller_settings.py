"""The controller's settings, and the time at which a page is written to L3.

Names and defaults are SGLang's (sglang/srt/mem_cache/unified_radix_cache.py).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hicache_storage.durations import check_seconds
from hicache_storage.prefetch_policy import PrefetchPolicy

MIN_END_WAIT_S = 0.1
"""Minimum wait for a call or a thread to end: it needs a moment also where the timeout has passed."""


class WritePolicy(enum.Enum):
    """The time at which a page of L2 is written to L3."""

    WRITE_THROUGH = "write_through"
    """A page is written as soon as it is in L2."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """A page is written when it is used a second time."""
    WRITE_BACK = "write_back"
    """A page is written when L2 evicts it."""

    @property
    def uses(self) -> int | None:
        """Uses of a page, its arrival included, after which it is written; None: at its eviction."""
        return {"write_through": 1, "write_through_selective": 2}.get(self.value)


class PartialHits(enum.Enum):
    """The treatment of a page that the required pools have and an optional pool, a draft's, lacks."""

    SHORTEN = "shorten"
    """The prefix ends in front of the page. Drafting loses no token that way."""
    TAKE_TARGET = "take_target"
    """The prefix includes the page. The lease names the pages that the draft must recompute or skip."""


class DropPolicy(enum.Enum):
    """The pages that are dropped when the write queue is full."""

    NEWEST = "newest"
    """The pages that are being queued are dropped."""
    OLDEST = "oldest"
    """The pages that were queued first are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The policies and limits of a controller's transfers between L2 and L3."""

    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_threshold_tokens: int = 256
    """Minimum number of missing tokens that are fetched from L3."""
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    batch_pages: int = 128
    """Maximum pages of one load or save. A prefetch can stop between two loads."""
    prefetch_threads: int = 1
    prefetch_capacity: float = 0.5
    """Share of L2 that unfinished prefetches may hold before another prefetch is refused."""
    inflight_nbytes: int | None = None
    """Maximum bytes of reads that the store has not answered; None: no limit."""
    write_queue_pages: int | None = None
    """Maximum pages in the write queue; further pages are dropped. None: the number of L2's pages."""
    drop_policy: DropPolicy = DropPolicy.NEWEST
    partial_hits: PartialHits = PartialHits.SHORTEN
    explained_requests: int = 1000
    """Number of ended requests that `explain` keeps."""

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

    def max_wait_s(self, pages: int, page_tokens: int) -> float | None:
        """Return the longest wait for `pages` pages, from the call of `result`; None: no limit."""
        return self.prefetch_policy.max_wait_s(
            pages * page_tokens,
            base_s=self.prefetch_timeout_base_s,
            per_ki_token_s=self.prefetch_timeout_per_ki_token_s,
        )
