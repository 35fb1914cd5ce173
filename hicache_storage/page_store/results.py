"""Pages on their way to and from a storage, and what became of each of them."""

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
    """What became of one page. Its value is the end of the counter's name."""

    OK = "ok"
    MISS = "miss"
    """A get found nothing."""
    REFUSED = "refused"
    """A set was answered with False: no room, or it lost a race."""
    CORRUPT = "corrupt"
    WRONG_KEY = "wrong_key"
    WRONG_SIZE = "wrong_size"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"
    """The storage raised something else, or broke its contract."""
    BREAKER_OPEN = "breaker_open"
    """Not tried: the store has been failing."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages of one pool on their way to or from the storage."""

    space: KeySpace
    """Bare, as given to `open_space`."""
    hashes: Sequence[str]
    pages: Sequence[FramedPage]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the pages of one call."""

    verdicts: list[list[Verdict]]
    """One list a transfer, one verdict a page, in the order of the hashes."""
    settled: Future[None]
    """Done when no memory of the call is touched any more. A call that overran its deadline may still
    be writing into its pages: they stay in quarantine until then, whatever the verdicts say."""

    def arrived(self) -> int:
        """Leading pages that are OK in every transfer."""
        whole = self.whole()
        return whole.index(False) if False in whole else len(whole)

    def whole(self) -> list[bool]:
        """For each page: is it OK in every transfer? No page where there is no transfer."""
        if not self.verdicts:
            return []
        pages = len(self.verdicts[0])
        if all(verdicts.count(Verdict.OK) == pages for verdicts in self.verdicts):
            return [True] * pages
        columns = zip(*self.verdicts, strict=True)
        return [all(verdict is Verdict.OK for verdict in column) for column in columns]


@dataclass(frozen=True, slots=True)
class Match:
    """What the storage says that it has of a prefix. Only a load proves it."""

    pages: int
    """The longest prefix that is usable in every pool."""
    usable: list[bool]
    """For each prefix length from 0 on: is it usable in every pool?"""
    present: list[list[bool]]
    """For each pool and page: did the storage say that it is there, or does the caller have it? Pages
    that no usable prefix needs were not asked for."""
    failures: list[Verdict | None]
    """For each pool: why the storage could not say what it has of it, or None where it could."""
