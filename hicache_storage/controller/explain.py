"""Why a request got as many pages as it got: one record and one sentence for an operator."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from dataclasses import dataclass

from hicache_storage.controller.topic import shown
from hicache_storage.page_store.results import Verdict


class Reason(enum.Enum):
    """Why a prefix is no longer. Its value completes a sentence about the first missing page."""

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
        """What a page's verdict means to the prefix that ends there."""
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
    """What became of one request's prefix."""

    request_id: str
    asked_pages: int
    usable_pages: int
    l2_pages: int
    l3_pages: int
    """Of the usable pages, those that were in host memory and those that came from storage."""
    first_missing: int | None = None
    """Index of the page for want of which the prefix is no longer; None: it is whole."""
    pool: str | None = None
    """The pool that lacks it; None where another rank does, or nothing was asked."""
    rank: int | None = None
    """The rank that has least, where that is not this one."""
    reason: Reason | None = None

    def __str__(self) -> str:
        told = (
            f"request {shown(self.request_id)}: {self.usable_pages} of {self.asked_pages} pages are"
            f" usable ({self.l2_pages} from host memory, {self.l3_pages} from storage)"
        )
        if self.reason is None:
            return told
        where = "" if self.pool is None else f" of pool {self.pool!r}"
        who = "" if self.rank is None else f" (rank {self.rank})"
        return f"{told}; page {self.first_missing}{where} {self.reason.value}{who}"


class Explanations:
    """The last `limit` of them, by request id. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Explanation] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, explanation: Explanation) -> None:
        """The newest; the oldest goes."""
        with self._lock:
            self._kept[explanation.request_id] = explanation
            self._kept.move_to_end(explanation.request_id)
            while len(self._kept) > self._limit:
                self._kept.popitem(last=False)

    def of(self, request_id: str) -> Explanation:
        """That of a request which has ended.

        Raises:
            LookupError: It has not, or others have ended since.
        """
        with self._lock:
            explanation = self._kept.get(request_id)
        if explanation is None:
            raise LookupError(
                f"request {shown(request_id)} is not among the last {self._limit} that have ended"
            )
        return explanation
