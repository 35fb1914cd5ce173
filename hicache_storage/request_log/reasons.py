"""The reasons for a missing page, each written as a clause for an operator."""

from __future__ import annotations

import enum

from hicache_storage.page_store.results import Verdict


class Reason(enum.Enum):
    """Why a prefix ends. The value completes a sentence about the first missing page."""

    ABSENT = "was not in storage"
    VANISHED = "was gone when it was read, though storage had said that it was there"
    CORRUPT = "was corrupt in storage, and was deleted there"
    WRONG_KEY = "had the header of another page in storage, and was deleted there"
    WRONG_SIZE = "had the wrong size in storage, and was deleted there"
    TIMEOUT = "did not come before the store's timeout"
    UNAVAILABLE = "could not be asked for: the store is unavailable"
    PART_UNAVAILABLE = (
        "could not be asked for: the part of the store that may have it is unavailable"
    )
    STORE_ERROR = "could not be read: the store raised an error"
    BREAKER_OPEN = "was not asked for: the store keeps failing, so it gets no calls for a while"
    NO_STORE = "was not asked for: no store is attached"
    DETACHED = "was not read: the store was being detached"
    NO_HOST_SLOT = "had no place in host memory: all of it is pinned"
    EVICTED = "was read, and left host memory again before the request could begin"
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
    NOT_ADMITTED = "was not written: the admission rules keep it out of the store"
    REFUSED = "was not written: the store refused it, or too many pages wait to be written"

    @classmethod
    def of(cls, verdict: Verdict) -> Reason:
        """Return why a prefix ends at a page with this verdict of a load or a store."""
        return _BY_VERDICT.get(verdict, cls.STORE_ERROR)

    @classmethod
    def of_lookup(cls, verdict: Verdict) -> Reason:
        """Return why a prefix ends at a page with this verdict of a lookup."""
        return cls.ABSENT if verdict is Verdict.MISS else cls.of(verdict)


_BY_VERDICT = {
    Verdict.MISS: Reason.VANISHED,
    Verdict.CORRUPT: Reason.CORRUPT,
    Verdict.WRONG_KEY: Reason.WRONG_KEY,
    Verdict.WRONG_SIZE: Reason.WRONG_SIZE,
    Verdict.TIMEOUT: Reason.TIMEOUT,
    Verdict.UNAVAILABLE: Reason.UNAVAILABLE,
    Verdict.PART_UNAVAILABLE: Reason.PART_UNAVAILABLE,
    Verdict.BREAKER_OPEN: Reason.BREAKER_OPEN,
    Verdict.REFUSED: Reason.REFUSED,
    Verdict.NOT_ADMITTED: Reason.NOT_ADMITTED,
}
