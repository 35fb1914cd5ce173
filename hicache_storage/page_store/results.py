"""Transfers between a page store and its storage, and their results."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.frame import FramedPage


class Verdict(enum.Enum):
    """The result of one page. Its value is the end of a counter's name."""

    OK = "ok"
    MISS = "miss"
    """A get found nothing."""
    REFUSED = "refused"
    """A set returned False: the store is full, or the set lost a race."""
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    WRONG_SIZE = "wrong_size"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    """The storage raised another error, or broke its contract."""
    BREAKER_OPEN = "breaker_open"
    """The call was not tried, because earlier calls had failed."""
    NOT_ADMITTED = "not_admitted"
    """The page was not offered to the storage (`hicache_storage.page_store.admission`). A caller with an
    `Admission` gives this verdict, and a page store never does."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages of one pool that a call moves from or to the storage."""

    space: KeySpace
    """The key space without a frame, as `open_space` took it."""
    hashes: Sequence[str]
    pages: Sequence[FramedPage]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of the pages of one call."""

    verdicts: list[list[Verdict]]
    """One list for each transfer, one verdict for each page, in the order of the hashes."""
    settled: Future[None]
    """A future that is done when no thread touches memory of the call any more. A storage call that
    overran the deadline may still write into its pages. Those pages stay in quarantine until then,
    whatever their verdicts are."""

    def arrived(self) -> int:
        """Return the number of leading pages that are OK in every transfer."""
        whole = self.whole()
        return whole.index(False) if False in whole else len(whole)

    def whole(self) -> list[bool]:
        """Return for each page True if it is OK in every transfer. Return [] without transfers."""
        if not self.verdicts:
            return []
        pages = len(self.verdicts[0])
        if all(verdicts.count(Verdict.OK) == pages for verdicts in self.verdicts):
            return [True] * pages
        columns = zip(*self.verdicts, strict=True)
        return [all(verdict is Verdict.OK for verdict in column) for column in columns]


@dataclass(frozen=True, slots=True)
class Match:
    """The pages of a prefix that the storage claims to have. Only a load proves a claim."""

    pages: int
    """The longest prefix that is usable in every pool."""
    usable: list[bool]
    """For each prefix length from 0 on, True if it is usable in every pool."""
    present: list[list[bool]]
    """For each pool and page, True if the storage or the caller has the page. A page that no usable
    prefix needs is False, because no call asked for it."""
    failures: list[Verdict | None]
    """For each pool, the reason why the storage did not answer, or None where it answered."""
