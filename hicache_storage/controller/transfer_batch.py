"""The pages of several pools that one call moves between L2 and L3, and the verdict on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.controller.pools import pool_numbers
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pools import PoolBits, PoolSet
    from hicache_storage.page_store.results import Outcome, Transfer


class TransferBatch:
    """Rows of pages, each with the pools to transfer. One call of the page store moves all of them."""

    def __init__(self, pool_set: PoolSet) -> None:
        self._pools = pool_set.pools
        self._rows: list[PoolBits] = []
        self._members: list[list[int]] = [[] for _ in self._pools]
        self._hashes: list[list[str]] = [[] for _ in self._pools]
        self._slots: list[list[int]] = [[] for _ in self._pools]

    def add(self, page_hash: str, slots: Sequence[int | None], bits: PoolBits) -> None:
        """Add a row: a page, its slots, and the pools to transfer."""
        row = len(self._rows)
        self._rows.append(bits)
        for number in pool_numbers(bits):
            slot = slots[number]
            assert slot is not None, "only a page with a slot is transferred"
            self._members[number].append(row)
            self._hashes[number].append(page_hash)
            self._slots[number].append(slot)

    @property
    def nbytes(self) -> int:
        """The payload bytes of all pages."""
        return sum(
            len(rows) * pool.space.page_nbytes
            for pool, rows in zip(self._pools, self._members, strict=True)
        )

    def transfers(self) -> list[Transfer]:
        """Return the transfers of all pools, for one call of the page store."""
        return [
            transfer
            for pool, hashes, slots in zip(self._pools, self._hashes, self._slots, strict=True)
            if hashes
            for transfer in pool.transfers(hashes, slots)
        ]

    def succeeded(self, outcome: Outcome) -> list[PoolBits]:
        """Return, for each row, the pools in which every stored part is OK."""
        if all(verdicts.count(Verdict.OK) == len(verdicts) for verdicts in outcome.verdicts):
            return list(self._rows)
        failed = [0] * len(self._rows)
        for row, number, _ in self.failures(outcome):
            failed[row] |= 1 << number
        return [bits & ~bad for bits, bad in zip(self._rows, failed, strict=True)]

    def failures(self, outcome: Outcome) -> list[tuple[int, int, Verdict]]:
        """Return (row, pool, verdict of the first failed part) of each page that is not OK."""
        found: dict[tuple[int, int], Verdict] = {}
        for number, verdicts in self._verdicts_by_pool(outcome):
            for row, verdict in zip(self._members[number], verdicts, strict=True):
                if verdict is not Verdict.OK:
                    found.setdefault((row, number), verdict)
        return [(row, number, verdict) for (row, number), verdict in found.items()]

    def _verdicts_by_pool(self, outcome: Outcome) -> list[tuple[int, list[Verdict]]]:
        """Return each list of verdicts with the number of its pool. A pool has a list for each tile."""
        owners = [
            number
            for number, pool in enumerate(self._pools)
            if self._members[number]
            for _ in pool.stored
        ]
        return list(zip(owners, outcome.verdicts, strict=True))
