"""Pages of a prefix that a request computes again in one pool, since some rank lacks them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from hicache_storage.controller.cache import HostCache
    from hicache_storage.controller.entry import Entry
    from hicache_storage.controller.pool_set import Bits, PageSlots

    Ask: TypeAlias = Callable[[str, Sequence[int]], Sequence[int]]
    """A question and this rank's answers: the least of all ranks' answers, zeros where they are lost."""


@dataclass(frozen=True, slots=True)
class _Claim:
    entry: Entry
    slot: int
    spare: bool
    """The slot is none of the page's: this rank has the page, and another computes it again."""


class Claims:
    """The slots that one lease may write to, in each pool. Not thread-safe: the lease's lock guards it.

    All ranks compute a page that one of them lacks. A rank that has it writes to a spare slot meanwhile:
    somebody may be reading the slot that holds it.
    """

    def __init__(
        self,
        cache: HostCache,
        entries: Sequence[Entry],
        here: Sequence[Bits],
        *,
        ask: Ask,
        consider: Callable[[Sequence[Entry]], None],
    ) -> None:
        """Take the pages of a lease, and the pools that this rank has of each."""
        self._cache = cache
        self._entries = entries
        self._here = here
        self._ask = ask
        self._consider = consider
        self._claims: dict[int, dict[int, _Claim]] = {}
        self._done: set[tuple[int, int]] = set()

    def claim(self, number: int, pool: str, missing: Sequence[int]) -> dict[int, int]:
        """Those of the `missing` pages that every rank has a slot for, each with this rank's slot."""
        claims = self._claims.setdefault(number, {})
        fresh = {
            page: claim
            for page in missing
            if page not in claims and (claim := self._try(number, page)) is not None
        }
        foreign = number >= len(self._cache.pools)
        agreed: Sequence[int] = [0] * len(missing)
        try:
            can = [foreign or page in claims or page in fresh for page in missing]
            agreed = self._ask(f"the claims in {pool!r}", can)
        finally:
            for page, everywhere in zip(missing, agreed, strict=True):
                if page in fresh and everywhere:
                    claims[page] = fresh[page]
                elif page in fresh:
                    self._end(number, fresh[page])
        return {page: claim.slot for page, claim in claims.items()}

    def fill(self, number: int, pool: str, pages: Sequence[int]) -> None:
        """Claimed pages are written.

        Raises:
            ValueError: A page was not claimed. None is filled then.
        """
        claims = self._claims.get(number, {})
        for page in pages:
            if page not in claims:
                raise ValueError(f"page {page} of pool {pool!r} is not claimed by this lease")
        filled = [claims.pop(page) for page in pages]
        self._done.update((number, page) for page in pages)
        for claim in filled:
            if claim.spare:
                self._end(number, claim)
            else:
                self._cache.fill(claim.entry, 1 << number)
        self._consider([claim.entry for claim in filled])

    def give_back(self) -> None:
        """Let go of what was claimed and not filled."""
        claimed, self._claims = self._claims, {}
        for number, claims in claimed.items():
            for claim in claims.values():
                self._end(number, claim)

    def _try(self, number: int, page: int) -> _Claim | None:
        """A slot to write a page to on this rank; None where there is none, or nothing to write."""
        if number >= len(self._cache.pools) or (number, page) in self._done:
            return None
        entry, bit = self._entries[page], 1 << number
        if self._here[page] & bit:
            groups = self._cache.allocate([bit])
            slot = groups[0][number] if groups else None
            return None if slot is None else _Claim(entry, slot, spare=True)
        if not self._cache.claim(entry, bit):
            return None
        slot = entry.slots[number]
        assert slot is not None, "what is claimed has a slot"
        return _Claim(entry, slot, spare=False)

    def _end(self, number: int, claim: _Claim) -> None:
        """Nobody writes to the slot any more; the page is not there for that."""
        if claim.spare:
            group: PageSlots = [None] * len(self._cache.pools)
            group[number] = claim.slot
            self._cache.free([group])
        else:
            self._cache.unclaim(claim.entry, 1 << number)
