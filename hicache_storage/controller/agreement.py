"""What the ranks of an engine agree on about one request, and what is left when they cannot."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.controller.ranks import RanksLost
from hicache_storage.hit_policy import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.controller.ranks import Channel, Ranks
    from hicache_storage.counters import Counters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """The prefix that all ranks can use."""

    pages: int
    rank: int | None = None
    """Who has the shortest, where that is not this rank."""
    lost: bool = False
    """Nothing could be agreed on."""


class Agreement:
    """Asks the other ranks, until one of them is lost: from then on nothing is usable anywhere.

    A question is which prefix lengths this rank can use. With it goes a digest of the request, so that
    ranks which speak of different requests find out instead of mixing their answers.
    """

    def __init__(self, ranks: Ranks, counters: Counters) -> None:
        self._ranks = ranks
        self._counters = counters
        self._lost = False

    @property
    def alone(self) -> bool:
        """There is nobody to ask."""
        return self._ranks.size == 1

    def agree(self, channel: Channel, request_id: str, usable: Sequence[bool]) -> Agreed:
        """The longest prefix that is usable on every rank. Blocks until all have been asked.

        Every rank asks once for each request, on each channel, in the same order.
        """
        own = longest(usable)
        if self.alone:
            return Agreed(own)
        if self._lost:
            return Agreed(0, lost=True)
        size = self._ranks.size
        digest = _digest(request_id, len(usable))
        question = [*usable, digest, -digest, own * size + self._ranks.rank]
        try:
            *common, least, negated, shortest = self._ranks.minimum(channel, question)
            if (least, negated) != (digest, -digest):
                raise RanksLost(f"another rank asks about another request than {request_id!r}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001 - whatever it is, this rank is out of step from here
            self._lose(error)
            return Agreed(0, lost=True)
        pages = longest([bool(answer) for answer in common])
        rank = shortest % size
        return Agreed(pages, None if rank == self._ranks.rank or pages == own else rank)

    def _lose(self, error: Exception) -> None:
        if not self._lost:
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


def _digest(request_id: str, length: int) -> int:
    """62 bits: it and its negative fit into the ranks' 64."""
    told = hashlib.sha256(f"{length} {request_id}".encode()).digest()
    return int.from_bytes(told[:8], "little") >> 2
