"""What the ranks of one engine must agree on before any of them acts."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from hicache_storage.errors import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Channel(enum.Enum):
    """A sequence of agreements of its own, so that one thread's never wait for another's."""

    MATCH = "match"
    """What L2 and L3 have of a prefix: asked by the prefetching thread, in the order of the requests."""
    RESULT = "result"
    """What has arrived of it, and what is claimed of it: asked by the engine's thread, as it takes the
    requests up."""


class RanksLost(HiCacheError):
    """A rank did not answer, or asked another question: nothing can be agreed on any more."""


class Ranks(Protocol):
    """The ranks that run one engine together: tensor parallel and pipeline parallel.

    Every rank makes the same calls with as many values in the same order on each channel, whatever
    failed where: what a rank could not do, it answers with zeros.
    """

    @property
    def rank(self) -> int:
        """This process, from 0 to `size` - 1."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:
        """The smallest of all ranks' answers, one by one. Blocks until all have answered.

        Raises:
            RanksLost: Not all did within the time allowed, here or on another rank.
        """
        ...

    def close(self) -> None:
        """Let go of the other ranks; those who wait for this one lose it. Thread-safe, idempotent."""
        ...


class SingleRank:
    """An engine of one process, which agrees with itself."""

    rank = 0
    size = 1

    def all_reduce_min(self, channel: Channel, values: Sequence[int]) -> list[int]:  # noqa: ARG002 - the protocol's
        """Its own answer."""
        return list(values)

    def close(self) -> None:
        """Nothing to let go of."""
