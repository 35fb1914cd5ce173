"""Settings of a hand-off: its timeouts, the intervals of its lookups, and what stays in storage."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.durations import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """The settings of both sides. Each side uses its part of them."""

    timeout_s: float = 30.0
    """The decode side waits this long for a request, then takes the pages that are there. The prefill
    side waits this long for its own writes, then publishes the prefix that is written."""
    grace_s: float = 1.0
    """Time to load the pages that are there when the decode side's time is up."""
    poll_min_s: float = 0.005
    """Time between two lookups of completions, after a new request or a new completion."""
    poll_max_s: float = 0.1
    """Time between two lookups of completions, after a while without a new one."""
    load_every_s: float = 0.5
    """Time between two loads of the pages that are there, while completions are awaited."""
    stale_after_s: float = 600.0
    """Age at which a completion is stale, and is deleted by any reader. Two nodes whose clocks differ by
    more than this hand nothing over."""
    delete_pages: bool = False
    """True where the pages are deleted from storage once they are loaded. Otherwise they serve the next
    request."""

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
