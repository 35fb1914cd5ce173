"""How long a request waits for its prefetch.

Names and formulas are SGLang's (sglang/srt/mem_cache/unified_radix_cache.py).
"""

from __future__ import annotations

import enum


class PrefetchPolicy(enum.Enum):
    """How long a request waits for its pages. Then the request uses the pages that have arrived."""

    BEST_EFFORT = "best_effort"
    """Do not wait."""
    WAIT_COMPLETE = "wait_complete"
    """Wait until every page that was found has arrived or failed."""
    TIMEOUT = "timeout"
    """Wait as for WAIT_COMPLETE, but no longer than a limit that grows with the number of pages."""

    def max_wait_s(self, tokens: int, *, base_s: float, per_ki_token_s: float) -> float | None:
        """Return the longest wait for the pages of `tokens` tokens. None: no limit."""
        if self is PrefetchPolicy.WAIT_COMPLETE:
            return None
        if self is PrefetchPolicy.BEST_EFFORT:
            return 0.0
        return base_s + tokens / 1024 * per_ki_token_s
