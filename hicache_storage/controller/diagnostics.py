"""What a prefetch found out about the pages of its request, for as long as somebody may ask why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.controller.explain import Reason

if TYPE_CHECKING:
    from hicache_storage.controller.pool_set import Bits
    from hicache_storage.page_store.results import Verdict


_GONE = frozenset({Reason.VANISHED, Reason.CORRUPT})


class PrefetchDiagnostics:
    """Written by the prefetching thread, read when the request ends: perhaps while it still works."""

    def __init__(self) -> None:
        self.present: list[Bits] = []
        """For each page the pools that L2 has of it, or L3 says that it has; empty before that."""
        self.failures: dict[int, Verdict] = {}
        """Pools of which the store could not say what it has."""
        self.troubles: dict[tuple[int, int], Reason] = {}
        """(page, pool) that did not arrive."""
        self.stopped: Reason | None = None
        """Why nothing more was tried."""
        self.rank: int | None = None
        """The other rank that has least of the prefix."""

    def forget_gone(self) -> bool:
        """Leave out of `present` what storage turned out not to have; False where that is nothing more,
        or the store failed in other ways too."""
        if self.stopped or not _GONE.issuperset(self.troubles.values()):
            return False
        gone = [(page, pool) for page, pool in self.troubles if self.present[page] >> pool & 1]
        for page, pool in gone:
            self.present[page] &= ~(1 << pool)
        return bool(gone)

    def why(self, page: int, pool: int, *, overtaken: Reason) -> Reason:
        """Why a page is missing from a pool; `overtaken` where nothing speaks against it yet."""
        trouble = self.troubles.get((page, pool))
        if trouble is not None:
            return trouble
        if self.present and not self.present[page] >> pool & 1:
            failure = self.failures.get(pool)
            return Reason.ABSENT if failure is None else Reason.of(failure)
        return self.stopped or overtaken
