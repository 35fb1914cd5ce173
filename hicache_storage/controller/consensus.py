"""What the ranks of an engine agree on about one request, and what is left when they cannot."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.controller.engine_pools import EnginePools, partial_codes
from hicache_storage.controller.ranks import Channel, RanksLost
from hicache_storage.controller.topic import Topic
from hicache_storage.page_store.lookup import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.controller.pool_set import Bits, PoolSet
    from hicache_storage.controller.ranks import Ranks

logger = logging.getLogger(__name__)

_POOLS = Topic.of("the pools of the engine")
_NO_MORE = 1 << 62


@dataclass(frozen=True, slots=True)
class Agreed:
    """The prefix that all ranks can use."""

    pages: int
    rank: int | None = None
    """Who has the shortest, where that is not this rank."""
    lost: bool = False
    """Nothing could be agreed on."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one rank holds of a request's pages."""

    usable: list[bool]
    """For each prefix length: is it usable here?"""
    filled: list[Bits]
    """For each page, the pools that hold it."""
    target_pages: int
    """The longest prefix that the required pools have, here or in storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What all ranks have of a request: but for `here` the same on each of them."""

    agreed: Agreed
    pools: EnginePools
    filled: list[Bits]
    """For each page that was asked for, the pools that hold it on every rank that has them."""
    here: Sequence[Bits]
    """The same on this rank alone."""
    target_pages: int
    """How far the required pools would have gone, by the rank where that is least."""


class Agreement:
    """Asks the other ranks, until one of them is lost: from then on nothing is usable anywhere.

    With each question goes a digest of what it is about, so that ranks which speak of different things
    find out instead of mixing their answers. Every rank asks the same questions on each channel, in the
    same order; each channel is used by one thread.
    """

    def __init__(
        self, ranks: Ranks, counters: Counters, pool_set: PoolSet, vital: Bits | None = None
    ) -> None:
        """Take this rank's pools, and those without which a page is no hit; None: all of them."""
        self._ranks = ranks
        self._counters = counters
        self._pool_set = pool_set
        self._vital = pool_set.everything if vital is None else vital
        self._own_pools = EnginePools(pool_set)
        self._pools: EnginePools | None = None
        self._lost = False
        self._losing = threading.Lock()

    @property
    def alone(self) -> bool:
        """There is nobody to ask."""
        return self._ranks.size == 1

    def everywhere(
        self, channel: Channel, topic: Topic, question: str, values: Sequence[int]
    ) -> list[int] | None:
        """The least of all ranks' answers, one by one; None where the ranks are lost.

        Blocks until all have been asked, in one call of `Ranks.minimum`.
        """
        if self.alone:
            return list(values)
        if self._lost:
            return None
        code = topic.code(question, len(values))
        try:
            *common, least, negated = self._ranks.all_reduce_min(channel, [*values, code, -code])
            if (least, negated) != (code, -code):
                raise RanksLost(f"another rank does not ask for {question} of {topic.told}")  # noqa: TRY301
        except BaseException as error:
            self._lose(error)  # whatever it is, this rank is out of step from here
            if not isinstance(error, Exception):
                raise
            return None
        return common

    def agree(
        self, channel: Channel, topic: Topic, usable: Sequence[bool], more: Sequence[int] = ()
    ) -> tuple[Agreed, list[int]]:
        """The longest prefix that is usable on every rank, and the least of `more` values."""
        own, size = longest(usable), self._ranks.size
        shortest = own * size + self._ranks.rank
        common = self.everywhere(channel, topic, "the usable prefix", [*usable, shortest, *more])
        if common is None:
            return Agreed(0, lost=True), []
        pages = longest([bool(answer) for answer in common[: len(usable)]])
        rank = common[len(usable)] % size
        elsewhere = rank != self._ranks.rank and pages != own
        return Agreed(pages, rank if elsewhere else None), common[len(usable) + 1 :]

    def answers(
        self, channel: Channel, topic: Topic, question: str, values: Sequence[int]
    ) -> list[int]:
        """As `everywhere`, with zeros where the ranks are lost: nothing is agreed on then."""
        common = self.everywhere(channel, topic, question, values)
        return [0] * len(values) if common is None else common

    def take(self, topic: Topic, own: Holdings) -> Taken:
        """What a request gets on all ranks, given what this one holds of it.

        One call for each request, and before the first one some more for what pools the ranks have.
        """
        if self.alone:
            return self.of_this_rank(topic, own)
        pools = self._engine_pools()
        more = [own.target_pages, *pools.rows(own.filled)]
        agreed, common = self.agree(Channel.RESULT, topic, own.usable, more)
        if agreed.lost:
            common = [0] * len(more)
        return Taken(
            agreed=agreed,
            pools=pools,
            filled=pools.everywhere(own.filled, common[1:]),
            here=own.filled,
            target_pages=common[0],
        )

    def of_this_rank(self, topic: Topic, own: Holdings) -> Taken:  # noqa: ARG002 - as `take`
        """What the request would get if there were no other rank."""
        return Taken(
            agreed=Agreed(longest(own.usable)),
            pools=self._own_pools,
            filled=own.filled,
            here=own.filled,
            target_pages=own.target_pages,
        )

    def _engine_pools(self) -> EnginePools:
        if self._pools is None:
            self._pools = self._own_pools
            try:
                self._pools = EnginePools(self._pool_set, self._all_codes())
            except ValueError as error:
                self._lose(error)
        return self._pools

    def _all_codes(self) -> list[int]:
        """The partial pools of all ranks: the least that is left on any of them, again and again."""
        own, found = partial_codes(self._pool_set, self._vital), list[int]()
        while True:
            left = [code for code in own if not found or code > found[-1]]
            least = self.everywhere(
                Channel.RESULT, _POOLS, "the next", [min(left, default=_NO_MORE)]
            )
            if least is None or least[0] == _NO_MORE:
                return found
            found += least

    def _lose(self, error: BaseException) -> None:
        with self._losing:
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
            self._ranks.close()  # those who wait for this rank on the other channel go on
        except Exception:
            logger.warning("the other ranks could not be let go of", exc_info=True)
