"""How the ranks of an engine agree on the pages of a request, and what happens if a rank is lost."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.controller.pools import pool_numbers
from hicache_storage.controller.ranks import Channel, RanksLost, Topic, utf8_bytes
from hicache_storage.page_store.lookup import HitPolicy, longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.pools import CachePool, PoolBits, PoolSet
    from hicache_storage.controller.ranks import Ranks

logger: logging.Logger = logging.getLogger(__name__)

_POOLS_TOPIC = Topic.of("the pools of the engine")
_NO_MORE = 1 << 62
_WINDOW_BITS = 22
_NAME_BITS = 40


@dataclass(frozen=True, slots=True)
class AgreedPrefix:
    """The prefix that all ranks can use."""

    pages: int
    rank: int | None = None
    """The rank with the shortest prefix. None if no rank has a shorter prefix than this rank."""
    lost: bool = False
    """True if a rank is lost, so that nothing could be agreed on."""


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages of a request that one rank has."""

    usable: list[bool]
    """For each prefix length, True if the prefix is usable on this rank."""
    filled: list[PoolBits]
    """For each page, the pools that have it."""
    target_pages: int
    """The length of the longest prefix that the required pools have, in L2 or in storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedPages:
    """The pages of a request that all ranks have. The ranks agreed on all fields but `local`."""

    prefix: AgreedPrefix
    pools: EnginePools
    filled: list[PoolBits]
    """For each requested page, the pools that have it on every rank with that pool."""
    local: Sequence[PoolBits]
    """For each requested page, the pools that have it on this rank."""
    target_pages: int
    """The minimum of `RankPages.target_pages` over all ranks."""


class EnginePools:
    """The pools of this rank, followed by partial pools that only other ranks have. Immutable.

    A pool is partial if a usable prefix may lack some of its pages: an optional or a trailing pool. The
    ranks agree on each single page of these pools (`Consensus.agree_pages`).
    """

    def __init__(self, pool_set: PoolSet, codes: Sequence[int] = ()) -> None:
        """Use this rank's pools.

        `codes` are the codes of all partial pools, in the same order on all ranks.

        Raises:
            ValueError: Two ranks have a pool of the same name with different windows.
        """
        if len({code >> _WINDOW_BITS for code in codes}) != len(codes):
            raise ValueError("the ranks give one pool different windows")
        own = {_code(pool): number for number, pool in enumerate(pool_set.pools)}
        remote = [code for code in codes if code not in own]
        self._pool_set = pool_set
        self._remote = dict(enumerate(remote, start=len(pool_set)))
        by_code = {code: number for number, code in self._remote.items()} | own
        self.partial: tuple[int, ...] = tuple(by_code[code] for code in codes)
        """The numbers of the partial pools, in the order of their codes."""

    @property
    def all_pools(self) -> PoolBits:
        """The set of all these pools: the pools of this rank, and the partial pools of other ranks."""
        return (1 << len(self._pool_set) + len(self._remote)) - 1

    def is_own(self, number: int) -> bool:
        """Return True if this rank has the pool with this number."""
        return number < len(self._pool_set)

    def number(self, name: str) -> int:
        """Return the number of the pool with this name, on this or another rank.

        Raises:
            ValueError: There is no such pool.
        """
        digest = _name_digest(name)
        for number, code in self._remote.items():
            if code >> _WINDOW_BITS == digest:
                return number
        return self._pool_set.number(name)

    def needed(self, page: int, length: int) -> PoolBits:
        """Return the pools in which a prefix of `length` pages needs the page with the index `page`."""
        needed = self._pool_set.needed(page, length)
        for number, code in self._remote.items():
            window_pages = code & (1 << _WINDOW_BITS) - 1
            if not window_pages or page >= length - window_pages:
                needed |= 1 << number
        return needed

    def bitmaps(self, filled: Sequence[PoolBits]) -> list[int]:
        """Return a bit for each partial pool and page: 1 if the pool has it or is not on this rank."""
        return [
            bits >> number & 1 if self.is_own(number) else 1
            for number in self.partial
            for bits in filled
        ]

    def merged(self, filled: Sequence[PoolBits], bitmaps: Sequence[int]) -> list[PoolBits]:
        """Return `filled`, but with the bits of the partial pools taken from the agreed `bitmaps`."""
        merged = list(filled)
        for row, number in enumerate(self.partial):
            bit = 1 << number
            for page, present in enumerate(bitmaps[row * len(filled) : (row + 1) * len(filled)]):
                merged[page] = merged[page] | bit if present else merged[page] & ~bit
        return merged


class Consensus:
    """The agreement of all ranks on pages. Once a rank is lost, no page is usable on any rank.

    Every rank asks the same questions on each channel, in the same order, from one thread. Each question
    carries a digest of its topic. If ranks ask about different topics, they notice this and do not mix
    up their answers.
    """

    def __init__(
        self,
        ranks: Ranks,
        counters: Counters,
        pool_set: PoolSet,
        hit_pools: PoolBits | None = None,
    ) -> None:
        """Use this rank's pools. A page is a hit if all `hit_pools` have it (None: all pools)."""
        self._ranks = ranks
        self._counters = counters
        self._pool_set = pool_set
        self._hit_pools = pool_set.all_pools if hit_pools is None else hit_pools
        self._own_pools = EnginePools(pool_set)
        self._engine_pools: EnginePools | None = None
        self._lost = False
        self._lost_lock = threading.Lock()

    @property
    def single_rank(self) -> bool:
        """True if the engine has only one rank."""
        return self._ranks.size == 1

    def minimum(
        self, channel: Channel, topic: Topic, question: str, values: Sequence[int]
    ) -> list[int] | None:
        """Return the minimum of each value over all ranks, or None if a rank is lost.

        Block until all ranks have answered. This is one call of `Ranks.all_reduce_min`.
        """
        if self.single_rank:
            return list(values)
        if self._lost:
            return None
        code = topic.code(question, len(values))
        try:
            *common, least, negated = self._ranks.all_reduce_min(channel, [*values, code, -code])
            if (least, negated) != (code, -code):
                raise RanksLost(f"another rank did not ask for {question} of {topic.label}")  # noqa: TRY301
        except BaseException as error:
            self._lose_ranks(error)  # after any error, this rank's calls do not match the others'
            if not isinstance(error, Exception):
                raise
            return None
        return common

    def minimum_or_zeros(
        self, channel: Channel, topic: Topic, question: str, values: Sequence[int]
    ) -> list[int]:
        """Return the result of `minimum`, or zeros if a rank is lost."""
        common = self.minimum(channel, topic, question, values)
        return [0] * len(values) if common is None else common

    def agree_prefix(
        self, channel: Channel, topic: Topic, usable: Sequence[bool], more: Sequence[int] = ()
    ) -> tuple[AgreedPrefix, list[int]]:
        """Return the longest prefix usable on every rank, and the minimum of each value of `more`."""
        own, size = longest(usable), self._ranks.size
        shortest = own * size + self._ranks.rank
        common = self.minimum(channel, topic, "the usable prefix", [*usable, shortest, *more])
        if common is None:
            return AgreedPrefix(0, lost=True), []
        pages = longest([bool(answer) for answer in common[: len(usable)]])
        rank = common[len(usable)] % size
        is_other = rank != self._ranks.rank and pages != own
        return AgreedPrefix(pages, rank if is_other else None), common[len(usable) + 1 :]

    def agree_pages(self, topic: Topic, own: RankPages) -> AgreedPages:
        """Return which pages of a request all ranks have. `own` describes the pages of this rank.

        Each request takes one all-reduce. Before the first request, the ranks exchange their pools,
        which takes a few more.
        """
        if self.single_rank:
            return self.local_pages(topic, own)
        pools = self._agreed_pools()
        more = [own.target_pages, *pools.bitmaps(own.filled)]
        prefix, common = self.agree_prefix(Channel.RESULT, topic, own.usable, more)
        if prefix.lost:
            common = [0] * len(more)
        return AgreedPages(
            prefix=prefix,
            pools=pools,
            filled=pools.merged(own.filled, common[1:]),
            local=own.filled,
            target_pages=common[0],
        )

    def local_pages(self, topic: Topic, own: RankPages) -> AgreedPages:  # noqa: ARG002 - as `agree_pages`
        """Return which pages the request would get if this were the only rank."""
        return AgreedPages(
            prefix=AgreedPrefix(longest(own.usable)),
            pools=self._own_pools,
            filled=own.filled,
            local=own.filled,
            target_pages=own.target_pages,
        )

    def _agreed_pools(self) -> EnginePools:
        if self._engine_pools is None:
            self._engine_pools = self._own_pools
            try:
                self._engine_pools = EnginePools(self._pool_set, self._exchange_codes())
            except ValueError as error:
                self._lose_ranks(error)
        return self._engine_pools

    def _exchange_codes(self) -> list[int]:
        """Return the codes of all ranks' partial pools. Each all-reduce returns the next larger code."""
        own, found = partial_pool_codes(self._pool_set, self._hit_pools), list[int]()
        while True:
            left = [code for code in own if not found or code > found[-1]]
            least = self.minimum(
                Channel.RESULT, _POOLS_TOPIC, "the next", [min(left, default=_NO_MORE)]
            )
            if least is None or least[0] == _NO_MORE:
                return found
            found += least

    def _lose_ranks(self, error: BaseException) -> None:
        with self._lost_lock:
            if self._lost:
                return
            self._lost = True
        self._counters.add("ranks_lost")
        logger.error(
            "the ranks have lost each other, and every request is recomputed from now on:"
            " restart the engine (%s)",
            error,
        )
        try:
            self._ranks.close()  # so that ranks stop waiting for this rank on the other channel
        except Exception:
            logger.warning("the connections to the other ranks could not be closed", exc_info=True)


def partial_pool_codes(pool_set: PoolSet, hit_pools: PoolBits) -> list[int]:
    """Return the codes of this rank's partial pools: trailing pools, and pools outside `hit_pools`."""
    partial = pool_set.all_pools & ~hit_pools | pool_set.trailing
    return sorted(_code(pool_set.pools[number]) for number in pool_numbers(partial))


def _code(pool: CachePool) -> int:
    """Return 62 bits that identify a pool's name and window on every rank."""
    trailing = pool.hit_policy is HitPolicy.TRAILING_PAGES
    window_pages = min(pool.window_pages, (1 << _WINDOW_BITS) - 1) if trailing else 0
    return _name_digest(pool.space.pool) << _WINDOW_BITS | window_pages


def _name_digest(name: str) -> int:
    digest = hashlib.sha256(utf8_bytes(name)).digest()
    return int.from_bytes(digest[:8], "little") >> 64 - _NAME_BITS
