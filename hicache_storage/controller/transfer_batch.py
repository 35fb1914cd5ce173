"""Pages of several pools on one trip to or from L3, and what became of each of them in each pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.controller.pool_set import numbers
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits, PoolSet
    from hicache_storage.page_store.results import Outcome, Transfer


class TransferBatch:
    """Rows of pages, each with the pools that move: one merged call for all of them."""

    def __init__(self, pool_set: PoolSet) -> None:
        self._pools = pool_set.pools
        self._rows: list[Bits] = []
        self._members: list[list[int]] = [[] for _ in self._pools]
        self._hashes: list[list[str]] = [[] for _ in self._pools]
        self._slots: list[list[int]] = [[] for _ in self._pools]

    def add(self, page_hash: str, slots: Sequence[int | None], bits: Bits) -> None:
        """One more row: these pools of a page, in these slots."""
        row = len(self._rows)
        self._rows.append(bits)
        for number in numbers(bits):
            slot = slots[number]
            assert slot is not None, "a page moves only between slots that it has"
            self._members[number].append(row)
            self._hashes[number].append(page_hash)
            self._slots[number].append(slot)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(
            len(rows) * pool.space.page_nbytes
            for pool, rows in zip(self._pools, self._members, strict=True)
        )

    def transfers(self) -> list[Transfer]:
        """All pools' parts, for one call to the page store."""
        return [
            transfer
            for pool, hashes, slots in zip(self._pools, self._hashes, self._slots, strict=True)
            if hashes
            for transfer in pool.transfers(hashes, slots)
        ]

    def ok(self, outcome: Outcome) -> list[Bits]:
        """For each row, the pools of which every stored part is OK."""
        if all(verdicts.count(Verdict.OK) == len(verdicts) for verdicts in outcome.verdicts):
            return list(self._rows)
        return [bits & ~bad for bits, bad in zip(self._rows, self._bad(outcome), strict=True)]

    def failures(self, outcome: Outcome) -> list[tuple[int, int, Verdict]]:
        """(row, pool, verdict) of each page that is not OK; of several parts, the first one's."""
        found: dict[tuple[int, int], Verdict] = {}
        for number, verdicts in self._per_pool(outcome):
            for row, verdict in zip(self._members[number], verdicts, strict=True):
                if verdict is not Verdict.OK:
                    found.setdefault((row, number), verdict)
        return [(row, number, verdict) for (row, number), verdict in found.items()]

    def _bad(self, outcome: Outcome) -> list[Bits]:
        bad = [0] * len(self._rows)
        for row, number, _ in self.failures(outcome):
            bad[row] |= 1 << number
        return bad

    def _per_pool(self, outcome: Outcome) -> list[tuple[int, list[Verdict]]]:
        """The pool of each list of verdicts: a pool stored in parts has several."""
        owners = [
            number
            for number, pool in enumerate(self._pools)
            if self._members[number]
            for _ in pool.stored
        ]
        return list(zip(owners, outcome.verdicts, strict=True))
