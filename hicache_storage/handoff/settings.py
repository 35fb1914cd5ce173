"""How long a hand-off waits, how often it looks, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.durations import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffSettings:
    """The same for both sides, of which each uses its part."""

    timeout_s: float = 30.0
    """The decode side waits that long for a request, then takes what is there; the prefill side that
    long for its own writes, then says how far they got."""
    grace_s: float = 1.0
    """What is there when the decode side's time is up is loaded for at most that long."""
    poll_min_s: float = 0.005
    poll_max_s: float = 0.1
    """Looks for completions are that far apart: close after a request or news, then less and less."""
    load_every_s: float = 0.5
    """While completions are awaited, pages that are there by now are loaded that often."""
    stale_after_s: float = 600.0
    """A completion of this age belongs to nobody: whoever sees it deletes it. Clocks that differ by
    more than this hand nothing over."""
    delete_pages: bool = False
    """Once loaded, the pages leave the storage too. Left there, they serve the next request."""

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
