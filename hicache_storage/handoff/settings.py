"""Settings of a hand-off: timeouts, intervals of lookups, and whether pages stay in storage."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.durations import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """The settings of the prefill side and of the decode side. Each side uses only its own part."""

    timeout_s: float = 30.0
    """How long the decode side waits for a request before it takes the pages that have arrived, and
    how long the prefill side waits for its own writes before it publishes the prefix that is
    written."""
    grace_s: float = 1.0
    """How much longer the decode side may load pages that have arrived when its time is up."""
    poll_min_s: float = 0.005
    """Interval between lookups of completions, after a new request or a new completion."""
    poll_max_s: float = 0.1
    """Interval between lookups of completions, when no completion has arrived for a while."""
    load_every_s: float = 0.5
    """Interval between loads of the pages that have arrived, while completions are awaited."""
    stale_after_s: float = 600.0
    """Age at which a completion is stale. Any reader deletes it. If the clocks of two nodes differ by
    more than this, no request is handed over."""
    delete_pages: bool = False
    """If True, delete the pages from storage once they are loaded. If False, the next request can use
    them."""

    def __post_init__(self) -> None:
        for name in (
            "timeout_s",
            "grace_s",
            "poll_min_s",
            "poll_max_s",
            "load_every_s",
            "stale_after_s",
        ):
            check_seconds(name, getattr(self, name))
        if self.poll_max_s < self.poll_min_s:
            raise ValueError(
                f"poll_max_s must be at least poll_min_s of {self.poll_min_s}, not {self.poll_max_s}"
            )
        if self.stale_after_s < self.timeout_s:
            raise ValueError(
                f"stale_after_s must be at least timeout_s of {self.timeout_s}, not"
                f" {self.stale_after_s}: completions would be deleted while they are awaited"
            )
