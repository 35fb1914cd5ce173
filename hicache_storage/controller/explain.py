"""The reason that a request got as many pages as it got: a record, and a sentence for an operator."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from dataclasses import dataclass

from hicache_storage.controller.ranks import shown_id
from hicache_storage.page_store.results import Verdict


class Reason(enum.Enum):
    """The reason that a prefix ends. Its value completes a sentence about the first missing page."""

    ABSENT = "was not in storage"
    VANISHED = "was gone when it was read, though storage had said that it was there"
    CORRUPT = "was corrupt in storage, and was deleted there"
    TIMEOUT = "did not come before the store's timeout"
    UNAVAILABLE = "could not be asked for: the store is unavailable"
    STORE_ERROR = "could not be read: the store raised an error"
    BREAKER_OPEN = "was not asked for: the store has been failing, and is left alone for a while"
    NO_STORE = "was not asked for: no store is attached"
    DETACHED = "was not read: the store was being detached"
    NO_HOST_SLOT = "had no place in host memory: all of it is pinned"
    BELOW_THRESHOLD = "was not fetched: fewer tokens are missing than the prefetch threshold"
    CAPACITY_LIMIT = "was not fetched: other prefetches hold their share of host memory"
    IN_FLIGHT_LIMIT = "was not read: too many bytes are in flight"
    BUSY = "was being filled by another request"
    PATIENCE = "had not arrived when the prefetch policy's time was up"
    DEADLINE = "had not arrived at the request's deadline"
    CANCELLED = "was not wanted any more: the request was cancelled"
    CLOSED = "was not fetched: the controller was closed"
    OTHER_RANK = "is missing on another rank"
    RANKS_LOST = "cannot be agreed on: the ranks have lost each other"
    INTERNAL_ERROR = "could not be fetched: an internal error, see the log"

    @classmethod
    def of(cls, verdict: Verdict) -> Reason:
        """Return the reason of a prefix that ends at a page with this verdict."""
        return _BY_VERDICT.get(verdict, cls.STORE_ERROR)


_BY_VERDICT = {
    Verdict.MISS: Reason.VANISHED,
    Verdict.CORRUPT: Reason.CORRUPT,
    Verdict.WRONG_KEY: Reason.CORRUPT,
    Verdict.WRONG_SIZE: Reason.CORRUPT,
    Verdict.TIMEOUT: Reason.TIMEOUT,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
    Verdict.BREAKER_OPEN: Reason.BREAKER_OPEN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result of one request's prefetch, and the first missing page where the prefix is cut."""

    request_id: str
    asked_pages: int
    usable_pages: int
    l2_pages: int
    """Usable pages that were in host memory."""
    l3_pages: int
    """Usable pages that came from storage."""
    first_missing: int | None = None
    """Index of the missing page at which the prefix ends; None where the prefix is whole."""
    pool: str | None = None
    """The pool that lacks the page; None where another rank lacks it, or no store was asked."""
    rank: int | None = None
    """The rank with the shortest prefix, where it is another rank."""
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
        """Add an explanation; drop the oldest beyond the limit."""
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
