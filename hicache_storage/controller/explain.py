"""Explain why a request got as many pages as it did, as a record and as a sentence for operators."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.controller.ranks import shown_id

if TYPE_CHECKING:
    from hicache_storage.request_log.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result of one request's prefetch: how long the prefix is, where it ends, and why it ends."""

    request_id: str
    asked_pages: int
    usable_pages: int
    l2_pages: int
    """How many usable pages were in host memory."""
    l3_pages: int
    """How many usable pages came from storage."""
    first_missing: int | None = None
    """The index of the missing page at which the prefix ends. None: the prefix is whole."""
    pool: str | None = None
    """The pool that lacks the page. None: another rank lacks it, or no store was asked."""
    rank: int | None = None
    """The rank with the shortest prefix, if another rank's prefix is shorter than this rank's."""
    reason: Reason | None = None

    def __str__(self) -> str:
        summary = (
            f"request {shown_id(self.request_id)}: {self.usable_pages} of {self.asked_pages} pages are"
            f" usable ({self.l2_pages} from host memory, {self.l3_pages} from storage)"
        )
        if self.reason is None:
            return summary
        pool = "" if self.pool is None else f" of pool {self.pool!r}"
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"{summary}; page {self.first_missing}{pool} {self.reason.value}{rank}"


class Explanations:
    """The explanations of the last `limit` requests that ended, by request id. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, Explanation] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, explanation: Explanation) -> None:
        """Add an explanation, and drop the oldest ones beyond the limit."""
        with self._lock:
            self._by_id[explanation.request_id] = explanation
            self._by_id.move_to_end(explanation.request_id)
            while len(self._by_id) > self._limit:
                self._by_id.popitem(last=False)

    def get(self, request_id: str) -> Explanation:
        """Return the explanation of a request that has ended.

        Raises:
            LookupError: The request has not ended, or is not among the last `limit`.
        """
        with self._lock:
            explanation = self._by_id.get(request_id)
        if explanation is None:
            raise LookupError(
                f"request {shown_id(request_id)} is not among the last {self._limit} that have ended"
            )
        return explanation
