"""The pools that all ranks of an engine have together, as far as one rank must know of the others'."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from hicache_storage.controller.pool_set import numbers
from hicache_storage.controller.topic import id_bytes
from hicache_storage.page_store.lookup import HitPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.pool_set import Bits, PoolSet
    from hicache_storage.controller.pools import CachePool

_WINDOW_BITS = 22
_NAME_BITS = 40


class EnginePools:
    """This rank's pools, and after them those of other ranks that it has not, in one numbering.

    Of others' pools it knows the partial ones: a prefix can be usable without pages of them, since they
    are optional, or trailing. Of these the ranks agree page by page (`Agreement.take`). Immutable.
    """

    def __init__(self, pool_set: PoolSet, codes: Sequence[int] = ()) -> None:
        """Take the partial pools of the engine, by the `codes` that all ranks have in one order.

        Raises:
            ValueError: Two ranks know a pool with different windows.
        """
        if len({code >> _WINDOW_BITS for code in codes}) != len(codes):
            raise ValueError("the ranks have a pool of one name with different windows")
        own = {_code(pool): number for number, pool in enumerate(pool_set.pools)}
        foreign = [code for code in codes if code not in own]
        self._pool_set = pool_set
        self._foreign = dict(enumerate(foreign, start=len(pool_set)))
        by_code = {code: number for number, code in self._foreign.items()} | own
        self.partial = tuple(by_code[code] for code in codes)
        """The partial pools, in the order of their codes."""

    @property
    def everything(self) -> Bits:
        """All of them."""
        return (1 << len(self._pool_set) + len(self._foreign)) - 1

    def is_own(self, number: int) -> bool:
        """Whether this rank has the pool."""
        return number < len(self._pool_set)

    def number(self, name: str) -> int:
        """The pool that its key space calls `name`, here or on another rank.

        Raises:
            ValueError: There is none.
        """
        digest = _name_digest(name)
        for number, code in self._foreign.items():
            if code >> _WINDOW_BITS == digest:
                return number
        return self._pool_set.number(name)

    def needed(self, page: int, length: int) -> Bits:
        """The pools that a prefix of `length` pages needs at `page`."""
        needed = self._pool_set.needed(page, length)
        for number, code in self._foreign.items():
            window_pages = code & (1 << _WINDOW_BITS) - 1
            if not window_pages or page >= length - window_pages:
                needed |= 1 << number
        return needed

    def rows(self, filled: Sequence[Bits]) -> list[int]:
        """For each partial pool and page whether this rank has it; it has no objection to others'."""
        return [
            bits >> number & 1 if self.is_own(number) else 1
            for number in self.partial
            for bits in filled
        ]

    def everywhere(self, filled: Sequence[Bits], rows: Sequence[int]) -> list[Bits]:
        """What is `filled` of each page, given the `rows` that all ranks have."""
        agreed = list(filled)
        for row, number in enumerate(self.partial):
            bit = 1 << number
            for page, there in enumerate(rows[row * len(filled) : (row + 1) * len(filled)]):
                agreed[page] = agreed[page] | bit if there else agreed[page] & ~bit
        return agreed


def partial_codes(pool_set: PoolSet, vital: Bits) -> list[int]:
    """The codes of this rank's partial pools: without `vital` ones a prefix is not usable."""
    partial = pool_set.everything & ~vital | pool_set.trailing
    return sorted(_code(pool_set.pools[number]) for number in numbers(partial))


def _code(pool: CachePool) -> int:
    """62 bits that say the same on every rank: the pool's name, and its window if it has one."""
    trailing = pool.hit_policy is HitPolicy.TRAILING_PAGES
    window_pages = min(pool.window_pages, (1 << _WINDOW_BITS) - 1) if trailing else 0
    return _name_digest(pool.space.pool) << _WINDOW_BITS | window_pages


def _name_digest(name: str) -> int:
    told = hashlib.sha256(id_bytes(name)).digest()
    return int.from_bytes(told[:8], "little") >> 64 - _NAME_BITS
