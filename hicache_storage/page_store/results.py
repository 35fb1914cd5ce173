"""The pages that you give to a page store, and the results that you get back."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class Verdict(enum.Enum):
    """The result for one page. Its value is the last part of a counter's name."""

    OK = "ok"
    MISS = "miss"
    """The storage does not have the page."""
    PART_UNAVAILABLE = "part_unavailable"
    """The part of the storage that may have the page did not answer: a disk, a server or a tier."""
    REFUSED = "refused"
    """The storage did not take the page: it is full, or another write came first."""
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    WRONG_SIZE = "wrong_size"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    """The storage raised another error or broke its contract."""
    BREAKER_OPEN = "breaker_open"
    """The call was not tried, because earlier calls failed."""
    NOT_ADMITTED = "not_admitted"
    """The page was not offered to the storage (`hicache_storage.page_store.admission`). Callers with an
    `Admission` use this verdict; a page store never does."""

    if not TYPE_CHECKING:
        __hash__ = object.__hash__  # Enum's is written in Python, and pages are counted by verdict


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages of one pool to move to or from the storage."""

    space: KeySpace
    """The key space that you gave to `open_space`, without a frame."""
    hashes: Sequence[str]
    pages: Sequence[Page]
    """The payload of each page, in your memory. It is yours again when the call returns or raises."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one call, page by page."""

    verdicts: list[list[Verdict]]
    """A list for each transfer, with a verdict for each page, in the order of the hashes."""

    def arrived(self) -> int:
        """Return how many leading pages are OK in every transfer."""
        whole = self.whole()
        return whole.index(False) if False in whole else len(whole)

    def whole(self) -> list[bool]:
        """Return True for each page that is OK in every transfer, or [] if there is no transfer."""
        if not self.verdicts:
            return []
        pages = len(self.verdicts[0])
        if all(verdicts.count(Verdict.OK) == pages for verdicts in self.verdicts):
            return [True] * pages
        columns = zip(*self.verdicts, strict=True)
        return [all(verdict is Verdict.OK for verdict in column) for column in columns]


@dataclass(frozen=True, slots=True)
class Match:
    """The pages of a prefix that the storage reports. Only a load proves that it has them."""

    pages: int
    """The length of the longest prefix that is usable in every pool."""
    usable: list[bool]
    """For each prefix length, starting at 0: True if that prefix is usable in every pool."""
    present: list[list[bool]]
    """For each pool and page, True if the storage or the caller has the page. A page that no usable
    prefix needs is False, because it was not queried."""
    failures: list[Verdict | None]
    """For each pool, why the storage did not answer, or None if it did."""
